"""Real adb server, real adbd, real agents: phones found, paired, and the states that lie told apart."""

import contextlib
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from bmoe_collector.commands.devices import look
from bmoe_collector.host import HostHome
from bmoe_collector.reach.routes import Reach
from bmoe_collector.store.engine import open_store
from support.agents import wait_for
from support.host import Host, check_no_forwards
from support.phones import Shelf, shelf


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    with shelf(tmp_path_factory.mktemp("shelf"), phones=2) as made:
        yield made


@pytest.fixture
def host(two: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(tmp_path / "host", two.env)
    for name in ("ANDROID_ADB_SERVER_PORT", "BMOE_HOME", "HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, made.env[name])
    return made


def states(host: Host) -> dict[str, str]:
    """What `bmoe devices` says, by place."""
    store = open_store(str(host.db))
    home = HostHome()
    with contextlib.closing(store), Reach(home, bytes.fromhex(store.store_id)) as reach:
        return {place: line["state"] for line in look(store, home, reach) for place in line["places"]}


def test_pairing_makes_phones_ready_and_leaves_nothing_behind(two: Shelf, host: Host) -> None:
    first, second = two.phones
    assert states(host) == {first.serial: "unpaired", second.serial: "unpaired"}
    refused = host.bmoe("pair", first.serial, stdin="ab" * 32 + "\n", code=3)
    assert "not the secret" in refused.stderr
    assert "abab" not in refused.stderr
    assert host.bmoe("pair", first.serial, stdin="nonsense\n", code=2).stdout == ""
    for phone in two.phones:
        host.pair(phone.agent, phone.serial)
    found = {line["uuid"]: line for line in host.json("devices")}
    assert set(found) == {phone.agent.uuid.hex() for phone in two.phones}
    for phone in two.phones:
        line = found[phone.agent.uuid.hex()]
        assert (line["state"], line["doing"], line["places"]) == ("ready", "idle", [phone.serial])
        assert "tiny.gguf" in line["models"]
    for path in (host.folder / "config" / "phones").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    check_no_forwards(two)


def test_another_store_reads_along_until_the_secret_is_rotated(two: Shelf, host: Host, tmp_path: Path) -> None:
    phone = two.phones[1]
    host.pair(phone.agent, phone.serial)
    other = Host(tmp_path / "other", two.env)
    refused = other.bmoe("pair", phone.serial, stdin=phone.agent.secret_hex + "\n", code=2)
    assert "--take-over" in refused.stderr
    other.bmoe("pair", phone.serial, "--read-only", stdin=phone.agent.secret_hex + "\n")
    host.bmoe("rotate", phone.agent.uuid.hex()[:8])
    assert phone.agent.secret.hex() != phone.agent.secret_hex
    phone.agent.secret_hex = phone.agent.secret.hex()
    assert states(host)[phone.serial] == "ready"
    lost = other.json("devices")
    assert [line["state"] for line in lost if line["uuid"] == phone.agent.uuid.hex()] == ["wrong_secret"]
    assert host.json("unpair", phone.agent.uuid.hex()[:8])["told"]
    assert states(host)[phone.serial] == "unpaired"


def test_states_that_lie_are_told_apart(two: Shelf, host: Host) -> None:
    first, second = two.phones
    for phone in two.phones:
        host.pair(phone.agent, phone.serial)
    first.agent.signal(signal.SIGSTOP)
    second.agent.kill()
    try:
        seen = states(host)
        assert seen[first.serial] == "frozen"
        assert seen[second.serial] == ("no_agent" if second.namespace else "unpaired")
    finally:
        first.agent.signal(signal.SIGCONT)
        second.agent.start()
    second.kill_adbd()
    wait_for(lambda: states(host)[second.serial] in {"away", "offline"}, "the phone without adbd to be away")
    second.start_adbd()
    second.connect()
    assert set(states(host).values()) == {"ready"}
    check_no_forwards(two)
