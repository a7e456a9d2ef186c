"""From the probe's text to the verdict: answers of a loop to values, shares of a core, places on the phone's clock."""

from dataclasses import replace

import pytest
from bmoe_collector.probe import processes
from bmoe_collector.probe.clock import Offset
from bmoe_collector.probe.frames import Frame
from bmoe_collector.probe.reading import THERMAL, HostSample, State, fast_files, learn, place, read, slow_dumps
from bmoe_collector.record import NoteRecord, SampleRecord
from bmoe_collector.verdicts import judge
from bmoe_proto.sample_text import decode
from support.run_records import clean, run

AGENT, ENGINE, PROBE, GAME, KSWAPD = 100, 200, 300, 400, 60

STAT = b"cpu  100 0 50 900 1 0 2 0 0 0\ncpu0 100 0 50 900 1 0 2 0 0 0\nintr 12 0 1\nctxt 77\nprocs_running 3\nprocs_blocked 1\nsoftirq 5\n"
VMSTAT = b"nr_free_pages 1000\npswpin 5\npswpout 6\npgmajfault 7\nnr_zone_unevictable 3\n"
POWER = b"POWER MANAGER (dumpsys power)\n  mWakefulness=%s\n  mHoldingWakeLockSuspendBlocker=true\n  other=1\n"
BATTERY = b"Current Battery Service state:\n  AC powered: false\n  USB powered: true\n  status: 2\n  level: 81\n  scale: 100\n  temperature: 305\n"
IDLE = b"  mLightState=ACTIVE mState=ACTIVE\n"


def line(pid: int, name: str, parent: int, ticks: int, start: int = 5) -> bytes:
    counts = f"0 0 20 0 4 0 {start} 1000 10 18446744073709551615 0 0"
    return f"{pid} ({name}) S {parent} {pid} {pid} 0 -1 4194560 1 0 0 0 {ticks} 0 {counts}\n".encode()


def listing(**ticks: int) -> bytes:
    return b"".join(
        [
            line(1, "init", 0, 10),
            line(2, "kthreadd", 0, 0),
            line(KSWAPD, "kswapd0", 2, ticks.get("kswapd", 0)),
            line(AGENT, "python3.14", 1, ticks.get("agent", 0)),
            line(150, "sh", AGENT, 0),
            line(ENGINE, "bmoe cli (x) 1", 150, ticks.get("engine", 0)),
            line(PROBE, "sh", 20, ticks.get("probe", 0)),
            line(301, "cat", PROBE, 9),
            line(GAME, "com.example.game", 1, ticks.get("game", 0)),
            b"garbage that is no process\n",
        ]
    )


def frame(data: bytes, before: float = 100.0, after: float = 100.02, status: int = 0) -> Frame:
    return Frame(1, status, data, before, after)


def files(**contents: bytes) -> bytes:
    return b"\n".join(b"==> /%s <==\n%s" % (path.encode(), body) for path, body in contents.items())


def state() -> State:
    made = State()
    tries = b"==> /proc/stat <==\ncpu 1\n\n==> /proc/zoneinfo <==\ncat: /proc/zoneinfo: Permission denied\n<== 1\n\n"
    zones = {
        "sys/class/thermal/thermal_zone0/type": b"cpu-1-0\n",
        "sys/class/thermal/thermal_zone1/type": b"cpu-hw-trip-0\n",
        "sys/class/thermal/thermal_zone2/type": b"battery\n",
    }
    learn(made, frame(tries), frame(files(**{"proc/uptime": b"1 1\n", **zones})))
    return made


def answers(at: float, wakefulness: bytes = b"Awake", **ticks: int) -> dict[str, Frame]:
    fast = files(
        **{
            "proc/uptime": b"%.2f 1.0\n" % at,
            "proc/stat": STAT,
            "proc/vmstat": VMSTAT,
            "sys/class/thermal/thermal_zone0/temp": b"61500\n",
        }
    )
    return {
        "files": frame(fast, at, at + 0.01),
        "procs": frame(listing(**ticks), at + 0.01, at + 0.02),
        "dumpsys power": frame(POWER % wakefulness, at, at + 0.02),
        "dumpsys battery": frame(BATTERY, at, at + 0.02),
        "dumpsys deviceidle": frame(IDLE, at, at + 0.02),
        "dumpsys thermalservice": frame(b"sh: dumpsys: inaccessible or not found\n", at, at + 0.03, 127),
        "cost": frame(
            b"300 (sh) R 20 300 300 0 -1 0 0 0 0 0 %d 1 4 5 20 0 1 0 5\n" % ticks.get("probe", 0), at, at + 0.03
        ),
    }


def samples(*moments: dict[str, Frame], whole: bool = True) -> list[HostSample]:
    known = state()
    found = []
    for moment in moments:
        at = place(list(moment.values()))
        assert at is not None
        found.append(read(known, "fast", moment, at, our_pids=(AGENT, ENGINE), probe_pid=PROBE, whole=whole))
    return found


def record(*found: HostSample):
    base = clean()
    return clean(
        run=run(launched_boot_ns=90 * 10**9, ended_boot_ns=200 * 10**9),
        samples=(
            *base.samples,
            *(SampleRecord(one.boot_ns, "host", one.kind, one.values, one.took_ms, one.refused) for one in found),
        ),
    )


def verdicts(*found: HostSample) -> dict[str, str]:
    return {verdict.code: verdict.evidence for verdict in judge(record(*found))}


def test_a_game_beside_the_engine_is_foreign_load_and_ours_is_not() -> None:
    busy = {"engine": 4000, "agent": 300, "kswapd": 400, "probe": 50}
    first, quiet = samples(answers(100.0), answers(105.0, **busy, game=20))
    assert "foreign_cpu_share" not in first.values
    assert quiet.values["foreign_process"] == "com.example.game"
    assert quiet.values["foreign_cpu_share"] == pytest.approx(0.04, abs=0.001)
    assert quiet.values["kernel_cpu_share"] == pytest.approx(0.8, abs=0.01)
    assert quiet.values["probe_cpu_ms"] == 500
    assert verdicts(first, quiet) == {}
    _, loud = samples(answers(100.0), answers(105.0, **busy, game=150))
    found = verdicts(first, loud)
    assert list(found) == ["foreign_load"]
    assert "com.example.game took 30%" in found["foreign_load"]


def test_load_before_the_launch_is_not_held_against_the_cell() -> None:
    first, loud = samples(answers(80.0), answers(92.0, game=900))
    assert loud.values["foreign_cpu_share"] > 0.5
    assert verdicts(first, loud) == {}


def test_a_dozing_phone_and_a_hot_entry_are_seen() -> None:
    (asleep,) = samples(answers(100.0, b"Dozing"))
    assert "dozing at the end" in verdicts(asleep)["not_awake"]
    (hot,) = samples(answers(91.0))
    assert hot.values["cpu_temp_c"] == 61.5
    cold = NoteRecord(0, "baseline", "", {"cpu_temp_c": 30.0})
    unread = replace(record(hot), samples=record(hot).samples[-1:], notes=(cold,))  # the agent may not read the zones
    assert "cpu_temp_c 61.5" in next(one.evidence for one in judge(unread) if one.code == "throttled_entry")
    assert (hot.values["battery_pct"], hot.values["charging"], hot.values["doze"]) == (81, True, "ACTIVE")
    assert (hot.values["screen_on"], hot.values["battery_temp_c"]) == (True, 30.5)


def test_what_could_not_be_read_is_said_with_the_reason_and_raw_text_is_kept() -> None:
    (sample,) = samples(answers(100.0))
    assert sample.refused == {
        "proc/zoneinfo": "Permission denied",
        "dumpsys thermalservice": "inaccessible or not found",
    }
    entries = {entry.name: entry for entry in decode(sample.text)}
    assert entries["proc/zoneinfo"].reason == "Permission denied"
    assert b"intr" not in (entries["proc/stat"].data or b"")
    assert entries["proc/stat"].cut
    assert entries["sys/class/thermal/thermal_zone0/temp"].data == b"61500\n"
    assert b"other=1" not in (entries["dumpsys power"].data or b"")
    (short,) = samples(answers(100.0), whole=False)
    assert short.refused == {"dumpsys thermalservice": "inaccessible or not found"}
    assert b"nr_zone" not in next(entry.data or b"" for entry in decode(short.text) if entry.name == "proc/vmstat")
    assert "vm_nr_zone_unevictable" not in sample.values
    assert sample.values["vm_pswpin"] == 5


def test_only_real_cpu_zones_are_read_each_time() -> None:
    words = fast_files(state()).split()
    assert [word for word in words if "thermal" in word] == ["/sys/class/thermal/thermal_zone0/temp"]


def test_the_thermal_service_is_asked_as_often_as_gates_need_where_no_zone_can_be_read() -> None:
    assert THERMAL not in slow_dumps(state())
    assert THERMAL in slow_dumps(State())


def test_a_process_id_that_was_used_again_counts_from_its_start() -> None:
    before = processes.listing(line(GAME, "old", 1, 100_000, start=5))
    after = processes.listing(line(GAME, "new", 1, 50, start=900))
    found = processes.load(before, after, 5.0, set())
    assert found is not None
    assert (found.busiest_command, found.busiest) == ("new", pytest.approx(0.1))
    assert processes.load({}, after, 5.0, set()) is None
    assert processes.load(before, after, 0.0, set()) is None


def test_a_sample_lies_where_its_uptimes_say_and_else_where_the_clock_call_says() -> None:
    frames = [frame(b"", 100.0, 100.1), frame(b"", 100.1, 100.4)]
    assert place(frames) == (100_205_000_000, 205_000_000)
    assert place([Frame(1, 0, b"", None, None)]) is None
    offset = Offset(here_ns=10**12, boot_ns=95 * 10**9, uncertainty_ns=3_000_000, boot_id="b")
    low, high = 10**12 + 5 * 10**9, 10**12 + 5 * 10**9 + 400_000_000
    middle, off = offset.place(low, high)
    assert middle == 100_200_000_000
    assert off == 3_000_000 + 200_000_000 + round(5.2e9 * 100e-6)
    assert offset.choose(place(frames), low, high) == place(frames)
    # a container's uptime is another clock
    assert offset.choose((7 * 10**9, 10_000_000), low, high) == (middle, off)
    assert offset.choose(None, low, high) == (middle, off)
