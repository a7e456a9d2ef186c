"""The host-side probe with a real adb server, a real adbd and real agents; Android's own commands are stand-ins where a test says so."""

import contextlib
import json
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bmoe_collector.ingest.rebuild import reparse
from bmoe_collector.probe.rows import KILL, SEARCHED
from bmoe_collector.probe.shell import BusyError, ProbeShell
from bmoe_collector.reach.adb import Adb, AdbError
from bmoe_collector.store.artifacts import Artifacts
from bmoe_collector.store.engine import open_store
from support.agents import wait_for
from support.host import Host, terminate
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
    asked = ["run", "--model", "tiny.gguf", "-p", "hello", "-n", "80", "--device", phone.serial]
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


STAND_IN = r"""#!/bin/sh
# Stands in for an Android command: says what lies in a file beside it, and writes down how it was called.
here=$(dirname "$0")
name=$(basename "$0")
echo "$name $*" >>"$here/calls"
case "$name $*" in
dumpsys*) cat "$here/$1.txt" 2>/dev/null || { echo "Can't find service: $1"; exit 0; } ;;
"logcat -d -b kernel"*) echo "logcat: Unable to open log device kernel: Permission denied" >&2; exit 1 ;;
logcat*) cat "$here/log.txt" ;;
dmesg*) echo "dmesg: klogctl: Permission denied" >&2; exit 1 ;;
"settings get"*) echo 0 ;;
"am force-stop com.example.stubborn") echo "java.lang.SecurityException: Permission Denial"; exit 255 ;;
esac
"""
POWER = "POWER MANAGER (dumpsys power)\n  mWakefulness=Awake\nDisplay Power: state=ON\n"
BATTERY = (
    "Current Battery Service state:\n  USB powered: true\n  status: 2\n  level: 83\n  scale: 100\n  temperature: 291\n"
)


@pytest.fixture(scope="module")
def android(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shelf, Path]]:
    """A phone whose shell has stand-ins for Android's commands; their folder."""
    folder = tmp_path_factory.mktemp("android")
    for name in ("dumpsys", "logcat", "dmesg", "settings", "am", "svc", "input"):
        (folder / name).write_text(STAND_IN)
        (folder / name).chmod(0o755)
    (folder / "power.txt").write_text(POWER)
    (folder / "battery.txt").write_text(BATTERY)
    (folder / "log.txt").write_text("--------- beginning of system\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        with shelf(tmp_path_factory.mktemp("shelf"), settings=SETTINGS) as made:
            patch.undo()
            yield made, folder


def test_a_cell_is_prepared_and_its_gates_hear_what_only_a_host_sees(
    android: tuple[Shelf, Path], tmp_path: Path
) -> None:
    made, folder = android
    phone = made.phones[0]
    host = Host(tmp_path / "host", made.env)
    host.pair(phone.agent, phone.serial)
    plan = tmp_path / "prepared.toml"
    plan.write_text(
        'name = "prepared"\nmodel = "tiny.gguf"\nprompt = "hello"\nn_predict = 20\n'
        'flags = ["--moe-stream", "--cache-mb", "4", "--force-cache"]\n'
        '[prepare]\nscreen_on = true\nstop_apps = ["com.example.game", "com.example.stubborn", "com.termux", "x; reboot"]\n'
        '[[gates]]\ngate = "screen"\nequals = 1\ntimeout_s = 90\npolicy = "skip"\n'
        '[[gates]]\ngate = "battery_pct"\nat_least = 50\ntimeout_s = 90\npolicy = "skip"\n'
    )
    done = host.json("run", str(plan), "--device", phone.serial)
    assert done["ok"], host.rows("select outcome, evidence from runs")[0]["evidence"]
    row = host.rows("select * from runs where run_id = ?", done["run"])[0]
    notes = host.rows("select * from notes where run_no = ? order by at", row["run_no"])
    told = {(note["code"], note["source"]): json.loads(note["facts"]) for note in notes}
    assert told["screen_on", "host"]["done"]
    assert told["screen_on", "agent"] == {"asked": True, "done": True}
    assert not told["stop_apps", "host"]["done"]
    apps = told["stop_apps", "host"]["apps"]
    assert apps["com.example.game"] == "stopped"
    assert apps["com.termux"] == "is the agent's own app"
    assert apps["x; reboot"] == "not a package's name"
    assert apps["com.example.stubborn"] == "Permission Denial"
    gates = {gate["gate"]: gate for gate in host.rows("select * from gates where run_no = ?", row["run_no"])}
    assert gates["screen"]["last"] == 1
    assert gates["screen"]["state"] in {"held", "waited"}  # the host's word may be a moment away
    assert gates["battery_pct"]["last"] in {83, None} or gates["battery_pct"]["source"] != "host"
    calls = (folder / "calls").read_text().splitlines()
    assert [line for line in calls if line.startswith("am ")] == [
        "am force-stop com.example.game",
        "am force-stop com.example.stubborn",
    ]

    def given_back() -> bool:
        lines = (folder / "calls").read_text().splitlines()
        return (
            lines.count("settings put global stay_on_while_plugged_in 0") == lines.count("svc power stayon true") == 1
        )

    wait_for(given_back, "the screen to be given back")


def test_a_kill_is_explained_by_the_phones_log(android: tuple[Shelf, Path], tmp_path: Path) -> None:
    made, folder = android
    phone = made.phones[0]
    host = Host(tmp_path / "host", made.env)
    host.pair(phone.agent, phone.serial)

    def pid() -> int:
        with contextlib.suppress(sqlite3.OperationalError):
            found = host.rows(
                "select n.facts from notes n join runs r using (run_no) where n.code = 'launched' and not r.ended and r.n_tokens > 3"
            )
            return int(json.loads(found[0]["facts"])["pid"]) if found else 0
        return 0

    with host.background("collect", "--device", phone.serial) as collecting:
        asked = ["run", "--model", "tiny.gguf", "-p", "hello", "-n", "1500", "--detach", "--device", phone.serial]
        plan = host.json(*asked, *FLAGS)["plan"]
        engine = wait_for(pid, "a running engine in the database")
        assert isinstance(engine, int)
        line = "ActivityManager: Killing PhantomProcessRecord {3f2a %d:1:bmoe-cli/u0a1}: Trimming phantom processes"
        (folder / "log.txt").write_text(
            "--------- beginning of system\n%17.3f  1000  1000 I ActivityManager: booted\n" % (time.time() - 3600)
            + f"{time.time():17.3f}  1000  1010 I {line % engine}\n"
        )
        os.kill(engine, signal.SIGKILL)

        def explained() -> bool:
            found = host.rows("select cause from runs where plan_id = ?", plan)
            return bool(found) and found[0]["cause"] == "phantom_killer"

        wait_for(explained, "the cause of death")
        terminate(collecting)
    row = host.rows("select * from runs where plan_id = ?", plan)[0]
    assert (row["outcome"], row["signal"]) == ("killed", 9)
    notes = host.rows("select * from notes where run_no = ? and source = 'host' order by at", row["run_no"])
    assert {note["code"] for note in notes} == {KILL, SEARCHED}
    search = next(json.loads(note["facts"]) for note in notes if note["code"] == SEARCHED)
    assert engine in search["pids"]
    assert search["unreadable"] == ["dmesg", "kernel"]
    # what hosts found survives making the rows again
    with contextlib.closing(open_store(str(host.db))) as store:
        reparse(store, Artifacts(str(host.folder / "artifacts")), row["run_id"])
    again = host.rows("select * from runs where plan_id = ?", plan)[0]
    assert (again["outcome"], again["cause"]) == ("killed", "phantom_killer")
    # nobody looks twice
    host.json("collect", "--once", "--device", phone.serial)
    assert len(host.rows("select at from notes where code = ?", SEARCHED)) == 1
