"""The host-side probe with a real adb server, a real adbd and real agents; Android's own commands are stand-ins where a test says so."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from bmoe_collector.probe.rows import SEARCHED
from bmoe_collector.probe.shell import BusyError, ProbeShell
from bmoe_collector.reach.adb import Adb, AdbError
from support.agents import wait_for
from support.host import Host
from support.phones import Phone, Shelf, shelf

FLAGS = ["--", "--moe-stream", "--cache-mb", "4", "--force-cache"]
SETTINGS = "tok_s=20,load_s=0.1,prefill_s=0.1"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    """A phone without any of Android's commands."""
    with shelf(tmp_path_factory.mktemp("bare"), settings=SETTINGS) as made:
        yield made


@pytest.fixture
def adb(bare: Shelf, monkeypatch: pytest.MonkeyPatch) -> Adb:
    for name in ("ANDROID_ADB_SERVER_PORT", "HOME"):
        monkeypatch.setenv(name, bare.env[name])
    return Adb()


def transport(adb: Adb, phone: Phone) -> int:
    return next(one.transport_id for one in adb.transports() if one.serial == phone.serial)


def loops(uuid: str) -> list[int]:
    """Processes of this machine that are this phone's loop."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if f".bmoe-probe-{uuid}".encode() in Path(f"/proc/{entry}/cmdline").read_bytes():
                    found.append(int(entry))
    return found


def test_the_loop_answers_ends_with_the_link_and_is_never_there_twice(bare: Shelf, adb: Adb) -> None:
    phone = bare.phones[0]
    uuid, store = phone.agent.uuid.hex(), "ab" * 16
    where = transport(adb, phone)
    with ProbeShell(adb, where, uuid, store) as first:
        assert loops(uuid) == [first.pid]
        files, refused, procs, cost, missing = first.ask(
            [
                ("files", "/proc/uptime /proc/loadavg /proc/vmstat /proc/absent"),
                ("try", "/proc/absent /proc/loadavg"),
                ("procs", ""),
                ("cost", ""),
                ("do", "dumpsys battery"),
            ],
            60,
        )
        assert b"==> /proc/vmstat <==" in files.data
        assert b"No such file" in refused.data
        assert f"\n{first.pid} (".encode() in procs.data
        assert cost.data.startswith(f"{first.pid} (".encode())
        assert (missing.status, b"not found" in missing.data) == (127, True)
        assert files.uptime_before_s is not None
        assert missing.uptime_after_s is not None
        assert files.uptime_before_s <= missing.uptime_after_s
        # another store's loop is left alone, the same store's that was left behind is ended
        with pytest.raises(BusyError, match="another host's probe"), ProbeShell(adb, where, uuid, "cd" * 16):
            pass
        with ProbeShell(adb, where, uuid, store) as second:
            wait_for(lambda: loops(uuid) == [second.pid], "the older loop to be gone")
            with pytest.raises(AdbError):
                first.ask([("cost", "")], 60)
        wait_for(lambda: loops(uuid) == [], "no loop to be left")
    assert not list(Path("/tmp").glob(f".bmoe-probe-{uuid}"))
    with ProbeShell(adb, where, uuid, store) as third:
        bare.server.kill()
        with pytest.raises(AdbError):
            third.ask([("cost", "")], 60)
        wait_for(lambda: loops(uuid) == [], "no loop to be left on the phone of a killed adb server")
    bare.server.start()
    phone.connect()


def test_samples_lie_in_their_run_with_what_was_refused(bare: Shelf, tmp_path: Path) -> None:
    phone = bare.phones[0]
    host = Host(tmp_path / "host", bare.env)
    host.pair(phone.agent, phone.serial)
    asked = ["run", "--model", "tiny.gguf", "-p", "hello", "-n", "160", "--device", phone.serial]
    run = host.json(*asked, *FLAGS)["run"]
    row = host.rows("select * from runs where run_id = ?", run)[0]
    samples = host.rows("select * from host_samples where run_no = ? order by boot_ns", row["run_no"])
    assert samples, host.log()
    for sample in samples:
        assert row["launched_boot_ns"] - 12e9 <= sample["boot_ns"] <= row["ended_boot_ns"] + 6e9
        assert sample["boot_id"] == row["boot_id"]
        assert 0 < sample["uncertainty_ns"] < 60e9
    values = [json.loads(sample["values"]) for sample in samples]
    assert all(one["sys_idle_ticks"] > 0 and one["uptime_s"] > 0 for one in values)
    assert any("probe_cpu_ms" in one for one in values)
    refused = {}
    for sample in samples:
        refused |= json.loads(sample["refused"] or "null") or {}
    assert "not found" in refused["dumpsys battery"]
    assert "not found" in refused["dumpsys thermalservice"]
    shown = host.json("show", run)
    assert shown["run"]["outcome"] == "ok"
    wait_for(lambda: loops(phone.agent.uuid.hex()) == [], "no loop to be left")
    assert host.rows("select * from notes where code = ?", SEARCHED) == []


def test_a_plan_can_switch_the_probe_off(bare: Shelf, tmp_path: Path) -> None:
    phone = bare.phones[0]
    host = Host(tmp_path / "host", bare.env)
    host.pair(phone.agent, phone.serial)
    plan = tmp_path / "quiet.toml"
    plan.write_text(
        'name = "quiet"\nmodel = "tiny.gguf"\nprompt = "hello"\nn_predict = 60\n\n[sampling]\nhost_probe_period_ms = 0\n\n'
        '[[cells]]\nname = "one"\nflags = ["--moe-stream", "--cache-mb", "4", "--force-cache"]\n'
    )
    done = host.json("run", str(plan), "--device", phone.serial)
    assert done["ok"]
    row = host.rows("select * from runs where run_id = ?", done["run"])[0]
    inside = host.rows(
        "select count(*) n from host_samples where boot_ns between ? and ?",
        row["launched_boot_ns"] + 2e9,
        row["ended_boot_ns"],
    )
    assert inside[0]["n"] == 0
