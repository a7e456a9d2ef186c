"""The watchdog's bounds, phase by phase, on a clock the test moves."""

import pytest
from bmoe_agent.watchdog import Bounds, Progress, Watchdog
from bmoe_proto.v1 import telemetry_pb2 as pb

pytestmark = pytest.mark.agent


def run(dog, progress, start, end, step=1.0):
    """Feed the same or changing progress from start to end; the first verdict and its time."""
    now = start
    while now <= end:
        verdict = dog.feed(now, progress(now) if callable(progress) else progress)
        if verdict:
            return now, verdict
        now += step
    return None


@pytest.mark.parametrize(("phase", "bound"), [("load", 30.0), ("start", 40.0), ("prefill", 40.0), ("decode", 5.0)])
def test_each_phase_has_its_own_bound(phase, bound):
    dog = Watchdog(Bounds(load_s=30, prefill_s=40, decode_s=5), 100.0)
    at, verdict = run(dog, Progress(phase, bytes_out=10, cpu_s=1.0, read_bytes=5), 100, 300)
    assert bound < at - 100 <= bound + 1
    rule = "load" if phase == "start" else phase
    assert (verdict.rule, verdict.bound, verdict.unit, verdict.action) == (rule, bound, "s", "sigterm")
    assert verdict.seen > bound


def test_a_silent_load_that_computes_or_reads_is_alive():
    bounds = Bounds(load_s=30, prefill_s=30)
    assert run(Watchdog(bounds, 0), lambda now: Progress("load", cpu_s=now * 0.5, read_bytes=0), 0, 600) is None
    assert (
        run(Watchdog(bounds, 0), lambda now: Progress("prefill", cpu_s=0.0, read_bytes=int(now) * 100_000), 0, 600)
        is None
    )


def test_a_sleeping_poll_loop_is_not_alive():
    found = run(
        Watchdog(Bounds(load_s=30), 0), lambda now: Progress("load", cpu_s=now * 0.001, read_bytes=4096), 0, 600
    )
    assert found
    assert found[1].rule == "load"


def test_in_decode_only_tokens_and_output_count():
    spinning = run(
        Watchdog(Bounds(decode_s=20), 0),
        lambda now: Progress("decode", tokens=3, cpu_s=now, read_bytes=int(now) << 20),
        0,
        100,
    )
    assert spinning[1].rule == "decode"
    assert "3 tokens" in spinning[1].detail
    assert run(Watchdog(Bounds(decode_s=20), 0), lambda now: Progress("decode", tokens=int(now / 15)), 0, 300) is None
    assert (
        run(Watchdog(Bounds(decode_s=20), 0), lambda now: Progress("decode", bytes_out=int(now / 15)), 0, 300) is None
    )


def test_a_phase_begins_with_its_whole_bound():
    dog = Watchdog(Bounds(load_s=30, prefill_s=30, decode_s=30), 0)
    for phase, start in (("load", 0), ("prefill", 25), ("decode", 50)):
        assert run(dog, Progress(phase), start, start + 24) is None
    assert run(dog, Progress("idle"), 75, 500) is None
    at, verdict = run(dog, Progress("prefill"), 501, 600)
    assert verdict.rule == "prefill"
    assert at > 530


def test_what_this_phone_cannot_read_is_no_progress_and_no_error():
    assert run(Watchdog(Bounds(load_s=10), 0), Progress("load", cpu_s=None, read_bytes=None), 0, 60)[1].rule == "load"


def test_total_time_holds_whatever_progress_there_is():
    at, verdict = run(Watchdog(Bounds(total_s=50), 0), lambda now: Progress("decode", tokens=int(now * 9)), 0, 200)
    assert (verdict.rule, at) == ("total", 51)


def test_time_asleep_is_not_the_engines():
    dog = Watchdog(Bounds(decode_s=20, total_s=100), 0)
    assert dog.feed(0, Progress("decode", tokens=1)) is None
    assert dog.feed(3600, Progress("decode", tokens=1)) is None
    assert run(dog, Progress("decode", tokens=1), 3601, 3615) is None
    assert run(dog, Progress("decode", tokens=1), 3616, 3700)[1].rule == "decode"


@pytest.mark.parametrize(
    ("bounds", "bad", "good", "rule"),
    [
        (Bounds(max_cpu_temp_c=80), {"cpu_temp_c": 85.0}, {"cpu_temp_c": 79.0}, "temperature"),
        (Bounds(min_battery_pct=20), {"battery_pct": 19.0}, {"battery_pct": 21.0}, "battery"),
        (Bounds(min_free_bytes=1000), {"free_bytes": 10}, {"free_bytes": 1000}, "disk"),
    ],
)
def test_surroundings_must_be_over_their_bound_several_times(bounds, bad, good, rule):
    dog = Watchdog(bounds, 0)
    for now, facts in enumerate([bad, bad, good, bad, bad]):
        assert dog.feed(now, Progress("decode", tokens=now, **facts)) is None
    verdict = dog.feed(6, Progress("decode", tokens=9, **bad))
    assert verdict.rule == rule
    assert verdict.seen == next(iter(bad.values()))


def test_a_charging_phone_is_not_stopped_for_its_battery():
    charging = lambda now: Progress("decode", tokens=int(now), battery_pct=5, charging=True)  # noqa: E731
    assert run(Watchdog(Bounds(min_battery_pct=20), 0), charging, 0, 30) is None
    unknown = lambda now: Progress("decode", tokens=int(now), battery_pct=5)  # noqa: E731
    assert run(Watchdog(Bounds(min_battery_pct=20), 0), unknown, 0, 30)[1].rule == "battery"


def test_sigterm_once_then_sigkill_once_after_the_grace():
    dog = Watchdog(Bounds(decode_s=5, grace_s=10), 0)
    at, first = run(dog, Progress("decode"), 0, 60)
    assert first.action == "sigterm"
    later, second = run(dog, lambda now: Progress("decode", tokens=int(now)), at + 1, at + 60)
    assert (second.rule, second.action, later - at) == ("decode", "sigkill", 10)
    assert run(dog, Progress("decode"), later + 1, later + 100) is None


def test_a_stop_asked_for_by_someone_else_has_the_same_grace():
    dog = Watchdog(Bounds(grace_s=3), 0)
    dog.asked_to_stop(10, run(Watchdog(Bounds(total_s=1), 0), Progress("load"), 0, 5)[1])
    assert run(dog, Progress("decode"), 11, 12) is None
    assert run(dog, Progress("decode"), 13, 20)[1].action == "sigkill"


def test_bounds_of_a_cell_and_its_plan():
    asked = pb.WatchdogAsk(load_s=0, decode_s=7, min_battery_pct=10)
    bounds = Bounds.of(asked, pb.Limits(min_battery_pct=25, min_free_bytes=99))
    assert (bounds.load_s, bounds.decode_s, bounds.total_s) == (None, 7, None)
    assert (bounds.min_battery_pct, bounds.min_free_bytes) == (25, 99)
    assert Bounds.of(pb.WatchdogAsk()) == Bounds()
    assert run(Watchdog(bounds, 0), Progress("load"), 0, 5000) is None


def test_the_report_is_the_message():
    verdict = run(Watchdog(Bounds(decode_s=5), 0), Progress("decode", tokens=4), 0, 60)[1]
    report = verdict.report("sigkill")
    assert (report.rule, report.bound, report.unit, report.action) == ("decode", 5.0, "s", "sigkill")
    assert "4 tokens" in report.detail
