"""Gates: each source on four kinds of device, waiting on a clock the test moves, and the speed probe's arithmetic."""

import itertools
import json
import random
from pathlib import Path

import pytest
from bmoe_agent.gates import GATES, Baseline, BaselineError, Gates, Reading, Told, baseline, speed
from bmoe_agent.gates.sources import Sources
from bmoe_agent.roots import Roots, lay
from bmoe_agent.sampling.observer import boot_ns
from bmoe_proto.asking import gate_problems
from bmoe_proto.v1 import telemetry_pb2 as pb

pytestmark = pytest.mark.agent
TREES = Path(__file__).parent.parent / "support" / "trees"


class Moment:
    """A clock that moves when someone sleeps."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000

    def clock(self):
        return self.ns

    def sleep(self, seconds):
        assert 0 < seconds <= 1000
        self.ns += int(seconds * 1e9)


class Scripted:
    """A source whose value is a function of seconds since the start; None is unreadable."""

    told = Told()

    def __init__(self, moment, value, cost_s=0.0) -> None:
        self.moment, self.value, self.cost_s = moment, value, cost_s
        self.began = moment.ns

    def read(self, gate):
        self.moment.ns += int(self.cost_s * 1e9)
        value = self.value((self.moment.ns - self.began) / 1e9)
        return Reading(value, "scripted" if value is not None else "refused", "test")


def wait(value, cost_s=0.0, called_off=lambda: False, **ask):
    moment = Moment()
    gates = Gates(Roots(), Path("/nowhere"), sources=Scripted(moment, value, cost_s))
    asked = {"gate": "cpu_temp_c", "comparison": "<=", "bound": 45, "timeout_s": 60, "policy": "skip", **ask}
    return gates.wait(pb.GateAsk(**asked), moment.clock, moment.sleep, called_off)


def tree_gates(name, tmp_path, told=None):
    return Gates(lay(TREES / f"{name}.toml", tmp_path), tmp_path, told)


def test_a_condition_that_is_met_is_held():
    report = wait(lambda _: 40.0)
    assert (report.state, report.waited_ns, report.last, report.asked) == ("held", 0, 40.0, "cpu_temp_c <= 45")
    assert (report.unit, report.policy, report.source, len(report.readings)) == ("°C", "skip", "test", 1)


def test_a_condition_that_comes_true_was_waited_for():
    report = wait(lambda s: 60.0 - s)
    assert report.state == "waited"
    assert 15e9 <= report.waited_ns <= 17e9
    assert [reading.value for reading in report.readings][:3] == [60.0, 59.0, 58.0]
    assert report.last <= 45


def test_a_condition_that_never_comes_true_gives_up_in_time():
    report = wait(lambda _: 60.0, timeout_s=20)
    assert (report.state, report.last) == ("gave_up", 60.0)
    assert 20e9 <= report.waited_ns <= 21e9


def test_no_time_to_wait_is_one_look():
    assert (len(wait(lambda _: 60.0, timeout_s=0).readings), wait(lambda _: 60.0, timeout_s=0).state) == (1, "gave_up")
    assert wait(lambda _: 40.0, timeout_s=0).state == "held"


def test_it_must_hold_for_its_settle_time():
    report = wait(lambda s: 60.0 if s % 10 > 4 and s < 30 else 40.0, settle_s=8)
    assert report.state == "waited"
    assert report.waited_ns >= 38e9
    settled = wait(lambda _: 40.0, settle_s=8, timeout_s=0)
    assert (settled.state, settled.waited_ns) == ("held", 8_000_000_000)
    assert wait(lambda s: 60.0 if s % 10 > 4 else 40.0, settle_s=8).state == "gave_up"


def test_a_source_that_never_answers_is_unreadable_soon():
    report = wait(lambda _: None, timeout_s=3600)
    assert report.state == "unreadable"
    assert report.waited_ns < 5e9
    assert not report.HasField("last")
    assert report.readings[0].text == "refused"
    assert not report.readings[0].HasField("value")


def test_a_source_that_answers_sometimes_is_asked_again():
    assert wait(lambda s: None if s % 10 > 3 else 60.0 - s).state == "waited"
    assert wait(lambda s: None if s > 3 else 60.0, timeout_s=30).state == "gave_up"


def test_a_source_that_answered_before_is_waited_for_while_it_is_away():
    moment = Moment()
    source = Scripted(moment, lambda _: 40.0)
    gates = Gates(Roots(), Path("/nowhere"), sources=source)
    ask = pb.GateAsk(gate="cpu_temp_c", comparison="<=", bound=45, timeout_s=60, policy="skip")
    assert gates.wait(ask, moment.clock, moment.sleep).state == "held"
    source.began, source.value = moment.ns, lambda s: None if s < 20 else 40.0  # the host's cable is out for a while
    report = gates.wait(ask, moment.clock, moment.sleep)
    assert report.state == "waited"
    assert 20e9 <= report.waited_ns < 22e9
    source.value = lambda _: None
    report = gates.wait(ask, moment.clock, moment.sleep)
    assert (report.state, report.HasField("last")) == ("gave_up", False)
    assert 60e9 <= report.waited_ns < 62e9


def test_called_off():
    assert wait(lambda _: 60.0, called_off=lambda: True).state == "gave_up"


def test_every_reading_of_a_long_wait_is_there_and_they_stay_some_hundreds():
    looks = []
    report = wait(lambda s: looks.append(s) or 30_000.0 - s, bound=1000, timeout_s=36000)
    assert report.state == "waited"
    assert [reading.value for reading in report.readings] == [30_000.0 - s for s in looks]
    assert len(looks) < 500
    apart = [later - sooner for sooner, later in itertools.pairwise(looks)]
    assert max(apart[:50]) == 1  # at first every second
    assert all(pause <= max(1, later / 59) for pause, later in zip(apart, looks[1:], strict=True))
    assert report.waited_ns < 29_000e9 * 61 / 60


def test_a_probe_that_costs_time_is_not_asked_every_second_and_lets_the_phone_cool():
    quick = wait(lambda _: 0.5, cost_s=0.5, gate="speed_probe_ratio", comparison=">=", bound=0.9, timeout_s=60)
    assert quick.state == "gave_up"
    assert 5 <= len(quick.readings) <= 8
    slow = wait(lambda _: 0.5, cost_s=3.0, gate="speed_probe_ratio", comparison=">=", bound=0.9, timeout_s=1800)
    assert 3.0 * len(slow.readings) <= 0.1 * slow.waited_ns / 1e9 + 2 * 3.0


def test_nothing_else_goes_on_while_the_phone_is_probed(tmp_path):
    seen = []
    sources = Sources(Roots(), tmp_path, probe=lambda _: seen.append(sources.probing) or speed.Speed(1, 1, 1, 1, 2))
    sources.probe_ended = lambda: seen.append(sources.probing)
    cold().save(tmp_path)
    assert sources.read("speed_probe_ratio").value == 1
    assert seen == [True, False]


class Changing:
    """Gates of one phone, each a function of seconds since the start."""

    told = Told()

    def __init__(self, moment, **gates) -> None:
        self.moment, self.gates, self.began = moment, gates, moment.ns

    def read(self, gate):
        return Reading(self.gates[gate]((self.moment.ns - self.began) / 1e9), "scripted", "test")


def wait_for_all(asks, most=20, **gates):
    moment = Moment()
    waiting = Gates(Roots(), Path("/nowhere"), sources=Changing(moment, **gates))
    reports = [*itertools.islice(waiting.wait_for_all(asks, moment.clock, moment.sleep), most)]
    return [(report.gate, report.state) for report in reports], reports


def test_what_held_before_a_long_wait_is_looked_at_again():
    cool = pb.GateAsk(gate="cpu_temp_c", comparison="<=", bound=45, timeout_s=600, settle_s=10)
    memory = pb.GateAsk(gate="mem_available_mib", comparison=">=", bound=2000, timeout_s=600, settle_s=5)
    # Memory is there at first, goes while the phone cools down, and comes back.
    found, reports = wait_for_all(
        [memory, cool],
        mem_available_mib=lambda s: 3000 if s < 50 or s > 200 else 1000,
        cpu_temp_c=lambda s: 60 - s / 10,
    )
    assert found == [
        ("mem_available_mib", "held"),
        ("cpu_temp_c", "waited"),
        ("mem_available_mib", "waited"),
        ("cpu_temp_c", "held"),
    ]
    assert reports[-1].waited_ns == 0  # it has settled before: one look is enough
    # Nothing is looked at twice when all of it took no time, or the only one that waited was the last.
    quick, _ = wait_for_all([memory, cool], mem_available_mib=lambda _: 3000, cpu_temp_c=lambda _: 40)
    assert quick == [("mem_available_mib", "held"), ("cpu_temp_c", "held")]
    assert len(wait_for_all([cool], cpu_temp_c=lambda s: 60 - s / 10)[0]) == 1


def test_a_second_look_has_no_more_time_than_was_asked_for():
    cool = pb.GateAsk(gate="cpu_temp_c", comparison="<=", bound=45, timeout_s=100, policy="run-flagged")
    memory = pb.GateAsk(gate="mem_available_mib", comparison=">=", bound=2000, timeout_s=90, policy="run-flagged")
    gates = {"mem_available_mib": lambda s: 3000 if s < 10 else 1000, "cpu_temp_c": lambda s: 60 if s < 60 else 40}
    found, reports = wait_for_all([memory, cool], **gates)
    assert found == [
        ("mem_available_mib", "held"),
        ("cpu_temp_c", "waited"),
        ("mem_available_mib", "gave_up"),
        ("cpu_temp_c", "held"),
    ]
    assert 90e9 <= reports[2].waited_ns < 93e9
    # Two that never hold at the same time are given up in the end.
    found, reports = wait_for_all(
        [memory, cool],
        mem_available_mib=lambda s: 3000 if s % 80 < 40 else 1000,
        cpu_temp_c=lambda s: 60 if s % 80 < 40 else 40,
    )
    assert len(found) < 20
    assert sum(report.waited_ns for report in reports) < 200e9


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        ({"gate": "cpu_tmp"}, "no gate is called 'cpu_tmp'"),
        ({"gate": "cpu_temp_c", "comparison": "<"}, "'<' is no comparison"),
        ({"gate": "cpu_temp_c", "policy": "maybe"}, "'maybe' is no policy"),
        ({"gate": "cpu_temp_c", "unit": "K"}, "is in °C, not in K"),
    ],
)
def test_gates_asked_wrongly_are_refused_with_what_there_is(ask, said):
    assert said in gate_problems(pb.GateAsk(**ask))[0]
    report = wait(lambda _: 40.0, **ask)
    assert report.state == "unreadable"
    assert said in report.readings[0].text


def test_every_gate_has_a_reader_and_every_device_an_answer_or_a_reason(tmp_path):
    for tree in TREES.glob("*.toml"):
        can, cannot = tree_gates(tree.stem, tmp_path / tree.stem).readable()
        assert set(can) | set(cannot) == set(GATES)
        assert not set(can) & set(cannot)
        assert all(len(why) > 20 for why in cannot.values())


def test_temperature_is_of_real_cpu_zones(tmp_path):
    reading = tree_gates("thermal_readable_capped", tmp_path / "a").read("cpu_temp_c")
    assert reading.value == 63.4
    assert "cpu-2-0-usr" in reading.text
    assert tree_gates("background_big_cores_excluded", tmp_path / "b").read("cpu_temp_c").value == 47.0
    dead = tree_gates("old_kernel_much_refused", tmp_path / "c").read("cpu_temp_c")
    assert dead.value is None
    assert "none of 5 readable thermal zones" in dead.text
    assert (
        "not readable for this app" in tree_gates("pages_16k_thermal_refused", tmp_path / "d").read("cpu_temp_c").text
    )


def test_the_cap_is_the_worst_domain(tmp_path):
    reading = tree_gates("thermal_readable_capped", tmp_path).read("clock_cap_ratio")
    assert reading.value == pytest.approx(0.6566, abs=1e-4)
    assert "policy7: 2092800 of 3187200 kHz" in reading.text


def test_excluded_big_cores_show(tmp_path):
    gates = tree_gates("background_big_cores_excluded", tmp_path)
    assert (gates.read("allowed_cpus").value, gates.read("fastest_cpus_ratio").value) == (4.0, 0.0)
    assert "fastest are 4-7, allowed 0-3" in gates.read("fastest_cpus_ratio").text


def test_memory_and_swap(tmp_path):
    gates = tree_gates("pages_16k_thermal_refused", tmp_path)
    assert gates.read("mem_available_mib").value == 6021120 / 1024
    assert gates.read("swap_used_mib").value == (6291440 - 4100112) / 1024


def test_battery_from_the_kernel_and_from_a_host_that_told_it_lately(tmp_path):
    assert tree_gates("thermal_readable_capped", tmp_path / "a").read("battery_pct").value == 78
    assert tree_gates("thermal_readable_capped", tmp_path / "a2").read("charging").value == 0.0
    moment, told = Moment(), Told()
    sources = Sources(lay(TREES / "pages_16k_thermal_refused.toml", tmp_path / "b"), tmp_path, told, moment.clock)
    assert "keep a host connected" in sources.read("battery_pct").text
    told.tell(
        {"battery_pct": 55, "charging": True, "screen_on": False, "cpu_temp_c": 41.5, "wakefulness": "Awake"}, moment.ns
    )
    assert [sources.read(gate).value for gate in ("battery_pct", "charging", "screen", "cpu_temp_c")] == [
        55.0,
        1.0,
        0.0,
        41.5,
    ]
    moment.sleep(30)
    moment.sleep(30)
    assert sources.read("screen").value == 0.0
    moment.sleep(1)
    assert sources.read("screen").value is None


def termux(tmp_path, monkeypatch, body, clock_ns=boot_ns):
    script = tmp_path / "bin" / "termux-battery-status"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"#!/bin/sh\necho x >> {tmp_path}/calls\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    # This machine's own /proc, an empty /sys: battery by Termux:API alone.
    roots = Roots()
    object.__setattr__(roots, "refused", {"sys/class/power_supply": 13})
    return Sources(roots, tmp_path, clock_ns=clock_ns), tmp_path / "calls"


def test_termux_api_is_asked_when_nothing_else_answers_and_not_at_every_reading(tmp_path, monkeypatch):
    sources, calls = termux(
        tmp_path, monkeypatch, """echo '{"percentage": 64, "plugged": "PLUGGED_AC", "status": "CHARGING"}'"""
    )
    assert (sources.read("battery_pct").value, sources.read("charging").value, sources.read("battery_pct").value) == (
        64.0,
        1.0,
        64.0,
    )
    assert calls.read_text().count("x") == 1


@pytest.mark.parametrize("body", ["exit 1", "echo nonsense", "echo '{}'", "echo '[]'"])
def test_termux_api_that_fails_is_not_asked_again_soon(tmp_path, monkeypatch, body):
    moment = Moment()
    sources, calls = termux(tmp_path, monkeypatch, body, moment.clock)
    assert "Termux:API app" in sources.read("battery_pct").text
    moment.sleep(599)
    assert sources.read("battery_pct").value is None
    assert calls.read_text().count("x") == 1
    (tmp_path / "bin" / "termux-battery-status").write_text("#!/bin/sh\necho '{\"percentage\": 64}'\n")
    moment.sleep(1)
    assert sources.read("battery_pct").value == 64  # it dozed for a while, and is no reason to be blind all night


def cold(**changes):
    facts = {
        "version": speed.VERSION, "units": 50, "threads": 4, "single_s": 0.25, "multi_s": 0.26, "single_spread": 0.01, "multi_spread": 0.02,
        "python": baseline.platform.python_version(), "zlib": baseline.zlib.ZLIB_RUNTIME_VERSION, "wall_ns": 1, "cpu_temp_c": 30.0,
        "clock_cap_ratio": 1.0, "passes": 15,
    }  # fmt: skip
    return Baseline(**{**facts, **changes})


def test_a_baseline_is_kept_and_refused_when_it_says_nothing(tmp_path):
    with pytest.raises(BaselineError, match="run `bmoe-agent baseline`"):
        baseline.load(tmp_path)
    cold().save(tmp_path)
    assert baseline.load(tmp_path) == cold()
    cold(python="2.7.1").save(tmp_path)
    with pytest.raises(BaselineError, match=r"recorded with Python 2\.7\.1"):
        baseline.load(tmp_path)
    cold(single_s=0).save(tmp_path)
    with pytest.raises(BaselineError, match="cannot be"):
        baseline.load(tmp_path)
    for torn in ("{", "[]", json.dumps({"version": 1})):
        (tmp_path / baseline.FILE).write_text(torn)
        with pytest.raises(BaselineError, match="not a baseline"):
            baseline.load(tmp_path)


def test_a_baseline_that_was_not_cold_says_so():
    assert cold().warnings() == []
    assert "capped to 66 %" in cold(clock_cap_ratio=0.66).warnings()[0]
    assert "had 61 °C" in cold(cpu_temp_c=61.0).warnings()[0]
    assert "something else was running" in cold(multi_spread=0.4).warnings()[0]


def test_the_probe_gate_reads_the_worse_of_both_ratios(tmp_path):
    found = speed.Speed(0.99, 0.52, 0.25, 0.5, 5)
    gates = Gates(Roots(), tmp_path, sources=Sources(Roots(), tmp_path, probe=lambda _: found))
    assert "bmoe-agent baseline" in gates.read("speed_probe_ratio").text
    cold().save(tmp_path)
    assert gates.read("speed_probe_ratio").value == 0.52
    assert "speed_probe_ratio" in gates.readable()[0]


def simulated(source, slow=1.0, noise=0.08):
    """Passes that take 0.25 s, now and then longer by what else the machine does, all of them `slow` times as long."""
    return lambda *_: 0.25 * slow * (1 + abs(source.gauss(0, 0.01)) + (source.random() < noise) * source.random())


def test_noise_gives_no_false_alarm_and_half_speed_is_always_noticed(monkeypatch):
    """200 idle probes with interruptions: at most 2 below 0.85; 200 at half speed: every one below 0.85."""
    monkeypatch.setattr(speed, "warm_up", lambda: None)
    source = random.Random(11)
    idle = [speed.measure(50, 4, 0.25, 0.25, simulated(source), simulated(source)).ratio for _ in range(200)]
    assert sum(ratio < 0.85 for ratio in idle) <= 2
    for single, multi in ((2.0, 2.0), (1.0, 2.0), (2.0, 1.0)):
        slow = [
            speed.measure(50, 4, 0.25, 0.25, simulated(source, single), simulated(source, multi)).ratio
            for _ in range(200)
        ]
        assert max(slow) < 0.6


def test_a_quick_machine_needs_one_pass_of_each(monkeypatch):
    monkeypatch.setattr(speed, "warm_up", lambda: None)
    assert speed.measure(50, 4, 0.25, 0.25, lambda _: 0.25, lambda *_: 0.25).passes == 2


def test_the_computation_is_the_same_everywhere():
    import hashlib

    assert hashlib.sha256(speed._DATA).hexdigest() == "78a60bb1f68a980fbb6543b877f4b8ec9f7c7028a4d9c77b830ee6bc2a1ce75b"
    assert 0.2 < len(speed.zlib.compress(speed._DATA, 6)) / len(speed._DATA) < 0.8


def test_really_measured_passes_do_their_work():
    count = speed.calibrate(0.02)
    assert count >= 1
    assert speed.single_s(count) > 0
    assert speed.multi_s(2, 3) > 0


def test_a_baseline_recorded_here_reads_near_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "calibrate", lambda: 4)
    told = []
    gates = Gates(Roots(), tmp_path)
    found = gates.record_baseline(passes=3, tell=lambda done, of: told.append((done, of)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert baseline.load(tmp_path) == found
    assert gates.read("speed_probe_ratio").value > 0
