"""Two collectors on one Postgres and one phone: never both draining, and one takes over from another in the lease's time."""

import contextlib
import hashlib
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import psycopg
import pytest
from bmoe_proto import framing
from bmoe_proto.v1 import telemetry_pb2 as pb
from support.adb import free_even_port
from support.agents import Agent, agent, wait_for
from support.host import Host

LEASE_S = 3.0
SETTINGS = "tok_s=25,load_s=0.1,prefill_s=0.1,copy="


@dataclass
class Pair:
    """Two collectors on one database, by the ports of their metrics pages."""

    host: Host
    phone: Agent
    url: str
    collectors: dict[int, Popen[bytes]]

    def state(self, port: int) -> str:
        """The one phone's state as a collector's page has it; empty while there is no page."""
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page,
        ):
            for line in page.read().decode().splitlines():
                if line.startswith("bmoe_phones{") and line.endswith(" 1"):
                    return line.split('"')[1]
        return ""

    def ready(self) -> tuple[int, int]:
        """The port of the one that drains and of the one that waits."""
        wait_for(lambda: sorted(map(self.state, self.collectors)) == ["held", "ready"], "one to drain and one to wait")
        first, second = sorted(self.collectors, key=self.state, reverse=True)
        return first, second

    def rows(self, query: str) -> list[tuple]:
        with psycopg.connect(self.url) as connection:
            return connection.execute(query).fetchall()

    def token(self) -> int:
        """Grows with every change of holder."""
        return int(self.rows("select token from leases where name like 'phone:%'")[0][0])

    def frames(self) -> Counter:
        """Every frame that is stored, by its identity."""
        found = Counter()
        for (data,) in self.rows("select data from blocks"):
            for block in framing.scan(bytes(data)):
                frames = map(pb.Frame.FromString, block.frames())
                found.update((frame.run_id, frame.segment, frame.seq) for frame in frames)
        return found


@pytest.fixture
def pair(postgres_url: str, tmp_path: Path) -> Iterator[Pair]:
    with agent(tmp_path / "phone", SETTINGS + str(tmp_path / "copies")) as phone, contextlib.ExitStack() as stack:
        phone.start()
        host = Host(tmp_path / "host")
        host.env |= {"BMOE_DB": postgres_url, "BMOE_ARTIFACTS": str(tmp_path / "artifacts")}
        where = f"local:{phone.socket}"
        host.pair(phone, where)
        host.json("run", "--model", "tiny.gguf", "-p", "leases", "-n", "200", "-d", where, "--detach")
        collectors = {}
        for port in (free_even_port(), free_even_port()):
            words = ["collect", "--device", where, "--lease", f"{LEASE_S}", "--metrics", str(port)]
            collectors[port] = stack.enter_context(host.background(*words))
        yield Pair(host, phone, postgres_url.replace("+psycopg", ""), collectors)


def check_whole(pair: Pair, copies: Path) -> None:
    """When the run is over the database holds what the engine wrote, each frame once."""
    wait_for(lambda: pair.rows("select 1 from runs where ended and complete"), "the run to be whole")
    ((stdout,),) = pair.rows("select sha256 from artifacts where kind = 'stdout'")
    (copy,) = copies.glob("*.stdout")
    assert stdout == hashlib.sha256(copy.read_bytes()).hexdigest()
    assert set(pair.frames().values()) == {1}
    assert pair.rows("select count(*) from tokens_stdout") == [(200,)]


def test_one_that_is_killed_is_followed_in_the_time_of_its_lease(pair: Pair, tmp_path: Path) -> None:
    first, second = pair.ready()
    token = pair.token()
    for _ in range(20):  # over more than one lease the holder stays the holder
        assert (pair.state(first), pair.state(second)) == ("ready", "held")
        time.sleep(0.2)
    assert pair.token() == token
    pair.collectors[first].kill()
    killed = time.monotonic()
    wait_for(lambda: pair.token() > token, "the other to take over")
    assert time.monotonic() - killed < LEASE_S + 1  # a second for a busy machine
    wait_for(lambda: pair.state(second) == "ready", "the other to drain")
    check_whole(pair, tmp_path / "copies")


def test_one_that_was_stopped_finds_that_it_is_not_the_holder_any_more(pair: Pair, tmp_path: Path) -> None:
    first, second = pair.ready()
    wait_for(pair.frames, "frames to come")
    token = pair.token()
    pair.collectors[first].send_signal(signal.SIGSTOP)
    wait_for(lambda: pair.token() > token, "the other to take over")
    wait_for(lambda: pair.state(second) == "ready", "the other to drain")
    pair.collectors[first].send_signal(signal.SIGCONT)
    wait_for(lambda: pair.state(first) == "held", "the one that was stopped to notice")
    assert pair.state(second) == "ready"
    check_whole(pair, tmp_path / "copies")
    assert pair.token() == token + 1  # it never went back
