"""The host's side without phones: names, secrets, the queue, routes, plans of one cell, logs and metrics."""

import json
import logging
import stat
from pathlib import Path

import pytest
from bmoe_collector.common import OutsideError, UserError, emit, plain
from bmoe_collector.doctor.machine import secrets
from bmoe_collector.fleet import logs, metrics, names, queue
from bmoe_collector.fleet.phone import PhoneBoard
from bmoe_collector.fleet.single import Single, plan_of, split_flags
from bmoe_collector.host import HostHome, PairedPhone, parse_secret
from bmoe_collector.reach.adb import Transport
from bmoe_collector.reach.routes import Sighting, best_routes, listening
from bmoe_collector.reach.states import ClockSeen, state_of, storage_problem
from bmoe_collector.store.engine import Store, open_store
from bmoe_proto import calls, proof
from bmoe_proto.v1 import telemetry_pb2 as pb

UUID_A, UUID_B = bytes(range(16)), bytes(range(16, 32))
UNIX = """Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 41 @bmoe-agent-00010203
0000000000000000: 00000003 00000000 00000000 0001 03 42 @bmoe-agent-00010203
0000000000000000: 00000002 00000000 00010000 0001 01 43 @with a space
0000000000000000: 00000002 00000000 00010000 0001 01 44 /dev/socket/logd
0000000000000000: 00000002 00000000 zz @broken
0000000000000000: 00000003 00000000 00000000 0001 03 45
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "runs.db"))


def test_listening_sockets_are_told_from_their_connections() -> None:
    assert listening(UNIX) == ["bmoe-agent-00010203", "with a space"]
    assert listening("cat: /proc/net/unix: Permission denied\n") == []


def test_one_phone_twice_is_one_and_one_serial_twice_is_two() -> None:
    usb, wifi = Transport(2, "SERIAL", "device"), Transport(1, "10.0.0.5:5555", "device")
    twin = Transport(3, "SERIAL", "device")
    routes = best_routes(
        [
            Sighting(wifi.serial, "reachable", socket="a", uuid=UUID_A, transport=wifi),
            Sighting(usb.serial, "reachable", socket="a", uuid=UUID_A, transport=usb),
            Sighting(twin.serial, "reachable", socket="b", uuid=UUID_B, transport=twin),
            Sighting("x", "offline"),
        ]
    )
    assert [way.where for way in routes[UUID_A]] == ["SERIAL", "10.0.0.5:5555"]
    assert [way.transport for way in routes[UUID_B]] == [twin]
    assert set(routes) == {UUID_A, UUID_B}


def test_every_failure_of_a_call_is_a_state_of_its_own() -> None:
    told = [calls.Frozen("x"), calls.NotThere("x"), calls.WrongSecret("x"), calls.TooOld("x"), calls.TooNew("x")]
    assert [state_of(error)[0] for error in told] == ["frozen", "no_agent", "wrong_secret", "too_old", "too_new"]
    assert state_of(calls.NotTheAgent("x"))[0] == "not_the_agent"


def test_clock_jumps_are_told_from_drift_and_reboots() -> None:
    first = ClockSeen.of(pb.ClockPair(boot_ns=10**9, wall_ns=10**18, boot_id="a"))
    later = pb.ClockPair(boot_ns=61 * 10**9, wall_ns=10**18 + 60 * 10**9 + 10**8, boot_id="a")
    assert first.jump_s(ClockSeen.of(later)) is None
    later.wall_ns -= 3600 * 10**9
    assert first.jump_s(ClockSeen.of(later)) == pytest.approx(-3599.9)
    later.boot_id = "b"
    assert first.jump_s(ClockSeen.of(later)) is None


def test_a_full_phone_says_so() -> None:
    assert storage_problem(pb.StatusReply(free_bytes=1 << 33, quota_bytes=100, spool_bytes=50)) == ""
    assert "spool at" in storage_problem(
        pb.StatusReply(free_bytes=1 << 33, quota_bytes=100 << 20, spool_bytes=96 << 20)
    )
    assert "MiB free" in storage_problem(pb.StatusReply(free_bytes=1 << 20, quota_bytes=1 << 40))


def test_secrets_are_read_in_both_forms_and_never_repeated(tmp_path: Path) -> None:
    secret = proof.new_secret()
    assert parse_secret(secret.hex().upper() + "\n") == secret
    assert parse_secret(proof.secret_text(secret)) == secret
    for wrong in ("", "zz" * 32, secret.hex()[:-1], proof.secret_text(secret)[:-3]):
        with pytest.raises(UserError) as caught:
            parse_secret(wrong)
        assert not wrong or wrong not in str(caught.value)
    home = HostHome(tmp_path / "home")
    home.remember(PairedPhone(UUID_A, secret, "sock", ("SERIAL",)))
    home.add_place(UUID_A, "10.0.0.5:5555")
    phone = home.phone(UUID_A)
    assert phone == PairedPhone(UUID_A, secret, "sock", ("10.0.0.5:5555", "SERIAL"))
    assert secret.hex() not in repr(phone)
    path = tmp_path / "home" / "phones" / f"{UUID_A.hex()}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700
    assert home.forget(UUID_A)
    assert not home.forget(UUID_A)


def test_phones_are_found_by_name_place_and_prefix(store: Store, tmp_path: Path) -> None:
    home = HostHome(tmp_path / "home")
    for uuid in (UUID_A, UUID_B):
        home.remember(PairedPhone(uuid, bytes(32), uuid.hex()))
    names.set_name(store, UUID_A.hex(), "pixel")
    with pytest.raises(UserError, match="already"):
        names.set_name(store, UUID_B.hex(), "pixel")
    for bad in ("a b", "+x", "beef", "x/y", "\x1b[0m"):
        with pytest.raises(UserError):
            names.set_name(store, UUID_B.hex(), bad)
    assert names.change_tags(store, UUID_B.hex(), ["lab", "old"], []) == ["lab", "old"]
    assert names.change_tags(store, UUID_B.hex(), [], ["old", "never"]) == ["lab"]
    seen = [Sighting("SERIAL", "reachable", uuid=UUID_B), Sighting("NEW", "unpaired")]
    assert names.find_phone(store, home, "pixel") == UUID_A
    assert names.find_phone(store, home, "SERIAL", seen) == UUID_B
    assert names.find_phone(store, home, UUID_B.hex()[:6]) == UUID_B
    with pytest.raises(UserError, match="bmoe pair NEW"):
        names.find_phone(store, home, "NEW", seen)
    assert names.choose_phones(store, home, seen, [], "lab", everyone=False) == [UUID_B]
    assert names.choose_phones(store, home, seen, [], None, everyone=True) == [UUID_A, UUID_B]
    assert names.choose_phones(store, home, seen, ["pixel", "SERIAL", "pixel"], None, everyone=False) == [
        UUID_A,
        UUID_B,
    ]
    assert names.choose_phones(store, home, seen, [], None, everyone=False) == [UUID_B]
    with pytest.raises(UserError, match="say which"):
        names.choose_phones(store, home, [], [], None, everyone=False)


def test_a_plan_waits_once_for_each_phone(store: Store) -> None:
    plan = plan_of(Single(model="m.gguf", prompts=[b"hi"], n_predict=3))
    assert queue.enqueue(store, plan, UUID_A, "away")
    assert not queue.enqueue(store, plan, UUID_A, "away")
    assert queue.enqueue(store, plan, UUID_B, "away")
    ((queue_id, waiting),) = queue.waiting(store, UUID_A)
    assert waiting == plan
    queue.settle(store, queue_id, "submitted")
    assert queue.waiting(store, UUID_A) == []
    assert [entry.uuid for entry in queue.listing(store)] == [UUID_B.hex()]


def test_one_benchmark_is_a_plan_of_one_cell() -> None:
    flags = split_flags(['--cache-mb 2048 --x "a b"'], ["--threads", "4"])
    asked = Single(
        model="m", prompts=[b"-p \xff"], n_predict=8, flags=flags, traces=["route,io", "io"], labels=["a=b=c"]
    )
    (cell,) = plan_of(asked).cells
    assert list(cell.flags) == ["--cache-mb", "2048", "--x", "a b", "--threads", "4"]
    assert cell.prompt == b"-p \xff"
    assert list(cell.artifacts) == ["metrics", "route", "io"]
    assert dict(cell.labels) == {"a": "b=c"}
    (session,) = plan_of(Single(model="m", prompts=[b"one", b"two"], n_predict=4)).cells
    assert [(turn.kind, turn.prompt, turn.n_predict) for turn in session.turns] == [
        ("generate", "one", 4),
        ("generate", "two", 4),
    ]
    for wrong in (Single(model=""), Single(model="m", traces=["rout"]), Single(model="m", labels=["x"])):
        with pytest.raises(UserError):
            plan_of(wrong)


def test_json_is_strict_and_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    emit({"nan": float("nan"), "inf": [float("inf")], "text": "ü\udcff", "bytes": b"\xff", 1: (1, None)})
    line = capsys.readouterr().out
    assert line.isascii()
    assert json.loads(line) == {"nan": None, "inf": [None], "text": "ü\udcff", "bytes": "�", "1": [1, None]}
    assert plain(Path("x")) == "x"


def test_logs_are_one_json_object_an_event() -> None:
    record = logging.makeLogRecord({"msg": "lost", "levelname": "WARNING", "phone": "ab" * 16, "detail": "\x1b[31mü"})
    line = json.loads(logs.JsonLines().format(record))
    assert (line["event"], line["phone"], line["detail"], line["level"]) == ("lost", "ab" * 16, "\x1b[31mü", "warning")
    assert "\x1b" not in logs.Words().format(record)


def test_metrics_are_in_the_exposition_format() -> None:
    board = PhoneBoard()
    board.heard(UUID_A, name='pi"xel\n', state="ready", backlog_bytes=5)
    board.add(UUID_A, batches=2, bytes=300)
    board.update(UUID_B, state="frozen")
    lines = metrics.text(board.all()).splitlines()
    assert 'bmoe_phones{state="ready"} 1' in lines
    assert f'bmoe_bytes_total{{phone="{UUID_A.hex()}",name="pi\\"xel\\n"}} 300' in lines
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    for line in lines:
        assert line.startswith("# ") or float(line.rpartition(" ")[2]) >= 0


def test_a_damaged_file_of_one_phone_keeps_no_other_from_its_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = HostHome(tmp_path / "home")
    for uuid in (UUID_A, UUID_B):
        home.remember(PairedPhone(uuid, b"k" * 32, "bmoe-agent"))
    torn = tmp_path / "home" / "phones" / f"{UUID_A.hex()}.json"
    whole = torn.read_bytes()
    torn.write_bytes(whole[:20])
    for _ in range(3):
        assert [phone.uuid for phone in home.phones()] == [UUID_B]
    said = capsys.readouterr().err
    assert said.count(str(torn)) == 1
    assert "pair the phone again" in said
    with pytest.raises(OutsideError, match="pair the phone again"):
        home.phone(UUID_A)
    assert [str(check.state) for check in secrets(home)] == ["fail"]
    torn.write_bytes(whole)
    assert len(home.phones()) == 2
    assert not home.damaged
