"""Secrets on both sides: files of their owner's alone, in no argv, log, output or database; ended by unpair and rotate."""

import contextlib
import logging
import os
import stat
import subprocess
import time
from pathlib import Path

import pytest
from bmoe_collector.common import OutsideError
from bmoe_collector.fleet.logs import JsonLines, Words
from bmoe_collector.host import HostHome, PairedPhone
from bmoe_collector.reach.forwards import Forwards
from bmoe_proto import calls, proof
from support.agents import agent as one_agent
from support.host import BMOE, Host


@pytest.fixture
def agent(tmp_path):
    with one_agent(tmp_path / "phone") as made:
        made.start()
        yield made


@pytest.fixture
def host(tmp_path):
    # whatever the environment says of proxies, channels to phones are not theirs
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"), "http://127.0.0.1:9")
    return Host(tmp_path / "host", proxies)


def forms(secret):
    """The secret as it could be written anywhere."""
    return [secret, secret.hex().encode(), secret.hex().upper().encode(), proof.secret_text(secret).encode(),
            proof.secret_text(secret).replace("-", "").encode()]  # fmt: skip


def holding(folder, secret):
    """Files below a folder that hold the secret in any form."""
    found = []
    for path in Path(folder).rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            if any(form in data for form in forms(secret)):
                found.append(path)
    return found


def open_to_others(folder):
    """Files and folders below (and with) `folder` that anybody else may do anything with."""
    places = [Path(folder), *Path(folder).rglob("*")]
    return [path for path in places if path.lstat().st_mode & 0o077 and not path.is_symlink()]


class WatchedArgv:
    """A program's argv and environment as other users see the former, sampled while it runs."""

    def __init__(self, command, stdin, env) -> None:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
        )
        with process:
            self.seen = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            process.stdin.write(stdin)
            process.stdin.close()
            while process.poll() is None:
                with contextlib.suppress(OSError):
                    for entry in os.listdir("/proc"):
                        if entry.isdigit():
                            with contextlib.suppress(OSError):
                                self.seen += Path(f"/proc/{entry}/cmdline").read_bytes()
                time.sleep(0.05)
            self.said = process.stdout.read()
            self.code = process.returncode


def test_a_secret_is_in_its_two_files_and_nowhere_else(agent, host, tmp_path):
    where = f"local:{agent.socket}"
    watched = WatchedArgv([str(BMOE), "pair", where], agent.secret_hex.encode() + b"\n", host.env)
    assert watched.code == 0, watched.said
    said = watched.said.decode()
    said += "".join(
        done.stdout + done.stderr
        for done in (
            host.bmoe("devices", "--json", code=None),
            host.bmoe("pair", where, stdin="wrong-secret\n", code=None),
            host.bmoe("pair", where, stdin="ab" * 32 + "\n", code=3),
            agent.run("init"),
            agent.run("status", check=False),
            agent.run("doctor", check=False),
        )
    )
    assert not any(form.decode("latin-1") in said for form in forms(agent.secret))
    assert not any(form in watched.seen for form in forms(agent.secret))
    kept = host.folder / "config" / "phones" / f"{agent.uuid.hex()}.json"
    assert set(holding(tmp_path, agent.secret)) == {agent.home / "secret", kept}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (agent.home / "secret", kept)} == {0o600}
    assert not open_to_others(host.folder / "config")
    assert stat.S_IMODE(agent.home.stat().st_mode) == 0o700
    # and the whole agent's environment and argv
    process = Path(f"/proc/{agent.process.pid}")
    assert not any(
        form in (process / name).read_bytes() for form in forms(agent.secret) for name in ("cmdline", "environ")
    )


def test_rotation_and_unpairing_end_what_was_known(agent, host, tmp_path):
    where, old = f"local:{agent.socket}", agent.secret
    host.pair(agent, where)
    host.bmoe("rotate", where)
    new = agent.secret
    assert new != old
    assert HostHome(host.folder / "config").phone(agent.uuid).secret == new
    for path in (agent.home / "secret", host.folder / "config" / "phones" / f"{agent.uuid.hex()}.json"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(calls.WrongSecret):
        calls.connect(f"unix-abstract:{agent.socket}", old, b"S" * 16)
    assert not holding(tmp_path, old)
    assert host.json("unpair", where)["told"]
    assert not holding(host.folder, new)
    # paired with nobody, the agent keeps its records for nobody; who has the secret may still pair
    with calls.connect(f"unix-abstract:{agent.socket}", new, b"S" * 16) as client:
        assert not client.status().kept_for_store
    host.bmoe("unpair", where, code=None)
    assert not (host.folder / "config" / "phones" / f"{agent.uuid.hex()}.json").exists()


@pytest.mark.parametrize("form", [JsonLines(), Words()])
def test_a_phone_in_a_log_shows_no_secret(form):
    phone = PairedPhone(b"u" * 16, b"k" * 32, "name", next_secret=b"n" * 32)
    record = logging.LogRecord("bmoe", logging.INFO, "f", 1, "%s", (phone,), None)
    record.known = phone
    shown = form.format(record) + repr(phone) + str([phone])
    for secret in (phone.secret, phone.next_secret):
        assert not any(part in shown for part in (secret.hex(), repr(secret), secret.decode()))


class TestTheForwardsFolder:
    """Who may enter the folder may reach the phone: it is this user's alone or not used."""

    @pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o777])
    def test_one_that_others_may_enter_is_refused(self, tmp_path, mode):
        base = tmp_path / "forwards"
        base.mkdir()
        base.chmod(mode)
        with pytest.raises(OutsideError, match="open to others"):
            Forwards(SilentAdb(), base)
        assert not list(base.iterdir())

    def test_a_link_laid_by_somebody_else_is_refused(self, tmp_path):
        target = tmp_path / "mine"
        target.mkdir(mode=0o700)
        (tmp_path / "forwards").symlink_to(target)
        with pytest.raises(OutsideError):
            Forwards(SilentAdb(), tmp_path / "forwards")
        assert not list(target.iterdir())

    def test_one_of_our_own_is_closed_to_others_and_taken_away(self, tmp_path):
        before = os.umask(0)
        try:
            forwards = Forwards(SilentAdb(), tmp_path / "forwards")
        finally:
            os.umask(before)
        assert not open_to_others(tmp_path / "forwards")
        forwards.close()
        assert not forwards.folder.exists()


class SilentAdb:
    """An adb server without forwards."""

    port = 1

    def forwards(self):
        return []


def test_an_umask_that_gives_everything_away_opens_no_secret(tmp_path):
    before = os.umask(0)
    try:
        HostHome(tmp_path / "config").remember(PairedPhone(b"u" * 16, b"k" * 32, "name"))
    finally:
        os.umask(before)
    assert not open_to_others(tmp_path / "config")
