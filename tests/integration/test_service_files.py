"""Files of ended runs: those that the run's end names, as they were then, from any offset."""

import os
import secrets

import pytest
from bmoe_proto import calls
from support.service import make_run, served

pytestmark = pytest.mark.agent

RUN = b"1" * 16


@pytest.fixture
def agent(tmp_path):
    with served(tmp_path) as made:
        yield made


@pytest.fixture
def client(agent):
    with agent.client() as made:
        yield made


def test_by_offset(agent, client):
    data = os.urandom(700_000)
    make_run(agent.spool, RUN, artifacts={"route.csv": data, "empty": b""})
    for offset in (0, 1, 300_000, 699_999):
        chunks = list(client.fetch(RUN, "route.csv", offset))
        assert b"".join(chunk.data for chunk in chunks) == data[offset:]
        assert [chunk.offset for chunk in chunks] == [
            offset + sum(len(earlier.data) for earlier in chunks[:at]) for at in range(len(chunks))
        ]
        assert {chunk.size for chunk in chunks} == {len(data)}
    for name, offset in [("route.csv", 700_000), ("empty", 0)]:
        assert b"".join(chunk.data for chunk in client.fetch(RUN, name, offset)) == b""


def test_what_was_added_to_a_file_since_is_not_given_and_one_cut_short_is_told(agent, client):
    """A process that the engine left behind may still write; the record names the bytes that were there."""
    data = os.urandom(300_000)
    make_run(agent.spool, RUN, artifacts={"grows.csv": data, "shrinks.csv": data})
    folder = agent.spool.files_directory(RUN)
    with open(os.path.join(folder, "grows.csv"), "ab") as file:
        file.write(b"more" * 100_000)
    os.truncate(os.path.join(folder, "shrinks.csv"), 5)
    for offset in (0, 299_999, 300_000):
        chunks = list(client.fetch(RUN, "grows.csv", offset))
        assert b"".join(chunk.data for chunk in chunks) == data[offset:]
        assert {chunk.size for chunk in chunks} == {len(data)}
    with pytest.raises(calls.Refused, match="5 bytes are left of the 300000"):
        list(client.fetch(RUN, "shrinks.csv"))


def test_only_what_the_runs_end_names(agent, client, tmp_path):
    make_run(agent.spool, RUN, artifacts={"m": b"x"})
    files = agent.spool.files_directory(RUN)
    with open(os.path.join(files, "unnamed"), "wb") as file:
        file.write(b"private")
    for name in ("unnamed", "../acks.json", "/etc/passwd", "", "m\0"):
        with pytest.raises(calls.Refused, match="no file"):
            next(client.fetch(RUN, name))
    with pytest.raises(calls.Refused, match="no file"):
        next(client.fetch(secrets.token_bytes(16), "m"))
    os.unlink(os.path.join(files, "m"))
    os.symlink("/etc/passwd", os.path.join(files, "m"))
    with pytest.raises(calls.Refused, match="m:"):
        next(client.fetch(RUN, "m"))
    os.unlink(os.path.join(files, "m"))
    with pytest.raises(calls.Refused, match="No such file"):
        next(client.fetch(RUN, "m"))
