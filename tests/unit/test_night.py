"""Which cell comes next: worked out from recorded runs alone, by the design's table of outcomes."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bmoe_agent import config, initialise, night
from bmoe_agent.serve.port import Measuring
from bmoe_agent.spool import RunSummary
from bmoe_agent.supervisor import Supervisor
from bmoe_agent.taking import problems, warnings
from bmoe_agent.todo import MAX_LOST, UNRUN_CAUSES, elapsed_s, next_attempt, next_cell, stops
from bmoe_proto.v1 import telemetry_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st
from support.agents import wait_for

pytestmark = pytest.mark.agent

PLAN = "ab" * 16


def run(outcome: str, cause: str = "", *, index: int = 0, attempt: int = 1, launched: bool = True) -> RunSummary:
    return RunSummary(
        bytes(16),
        plan_id=PLAN,
        cell_index=index,
        attempt=attempt,
        started=True,
        ended=True,
        launched=launched,
        outcome=outcome,
        cause=cause,
    )


@pytest.mark.parametrize(
    ("outcome", "cause", "again"),
    [
        ("ok", "tokens", False),
        ("skipped", "gate:cpu_temp_c", False),
        ("partial", "incomplete", True),
        ("failed", "engine_error", True),
        ("failed", "refused:flags", False),
        ("failed", "refused:model", False),
        ("killed", "out_of_memory", True),
        ("aborted", "cancelled", False),
        ("aborted", "thermal", False),
        ("aborted", "battery", False),
        ("aborted", "watchdog:decode", True),
        ("lost", "abandoned", True),
    ],
)
def test_what_is_tried_again_within_the_bound(outcome: str, cause: str, again: bool) -> None:
    cell = pb.Cell(retries=1)
    assert next_attempt(cell, [run(outcome, cause)]) == (2 if again else None)
    if outcome != "lost":
        assert next_attempt(cell, [run(outcome, cause), run(outcome, cause, attempt=2)]) is None
        assert next_attempt(pb.Cell(), [run(outcome, cause)]) is None


def test_lost_runs_again_whatever_the_bound_but_not_for_ever() -> None:
    lost = [run("lost", attempt=number + 1) for number in range(MAX_LOST)]
    assert next_attempt(pb.Cell(), lost[:-1]) == MAX_LOST
    assert next_attempt(pb.Cell(), lost) is None
    unlaunched = [run("lost", attempt=number + 1, launched=False) for number in range(50)]
    assert next_attempt(pb.Cell(), unlaunched) == 51
    assert next_attempt(pb.Cell(retries=1), [run("lost"), run("killed", attempt=2)]) == 3


@settings(max_examples=60, deadline=None)
@given(
    cells=st.integers(1, 8),
    outcomes=st.lists(
        st.sampled_from([("ok", ""), ("lost", ""), ("killed", ""), ("failed", "refused:flags"), ("skipped", "gate:x")]),
        min_size=60,
        max_size=60,
    ),
)
def test_every_plan_ends_with_every_cell_recorded_in_order(cells: int, outcomes: list[tuple[str, str]]) -> None:
    plan = pb.Plan(plan_id=PLAN, cells=[pb.Cell(index=n, retries=1) for n in range(cells)])
    runs: list[RunSummary] = [run("ok", index=0)]
    runs[0].plan_id = "cd" * 16  # another plan's run says nothing
    order: list[int] = []
    for outcome, cause in outcomes:
        todo = next_cell(plan, runs)
        if todo is None:
            break
        cell, attempt = todo
        assert attempt == 1 + sum(1 for one in runs if one.plan_id == PLAN and one.cell_index == cell.index)
        runs.append(run(outcome, cause, index=cell.index, attempt=attempt))
        order.append(cell.index)
    assert next_cell(plan, runs) is None
    assert order == sorted(order)
    assert set(order) == set(range(cells))


def test_plans_that_contradict_themselves_are_refused() -> None:
    good = pb.Cell(model="m", prompt=b"x")
    assert problems(pb.Plan(plan_id=PLAN, cells=[good])) == []
    assert problems(pb.Plan(plan_id="x", cells=[good]))
    assert problems(pb.Plan(plan_id=PLAN))
    assert problems(pb.Plan(plan_id=PLAN, cells=[good, good]))
    gate = pb.Cell(model="m", prompt=b"x", gates=[pb.GateAsk(gate="mood", policy="sulk")])
    (*found,) = problems(pb.Plan(plan_id=PLAN, cells=[gate]))
    assert any("mood" in problem for problem in found)
    assert any("sulk" in problem for problem in found)


def test_what_ended_a_plan_follows_from_its_runs() -> None:
    gates = [pb.GateAsk(gate="cpu_temp_c", policy="abort"), pb.GateAsk(gate="battery_pct", policy="skip")]
    plan = pb.Plan(plan_id=PLAN, cells=[pb.Cell(index=n, gates=gates) for n in range(3)])
    assert stops(plan, [run("ok"), run("skipped", "gate:battery_pct"), run("aborted", "thermal")]) == []
    assert stops(plan, [run("skipped", "gate:cpu_temp_c", index=1)]) == ["gate:cpu_temp_c"]
    assert stops(plan, [run("ok"), run("skipped", UNRUN_CAUSES[0], index=2)]) == [UNRUN_CAUSES[0]]
    assert stops(pb.Plan(plan_id="cd" * 16, cells=plan.cells), [run("skipped", UNRUN_CAUSES[0])]) == []


def test_a_clock_that_is_set_during_the_night_is_no_time_that_passed() -> None:
    def at(boot: str, boot_s: float, wall_s: float, index: int = 0) -> RunSummary:
        one = run("ok", index=index)
        one.boot_id, one.started_boot_ns, one.started_wall_ns = boot, int(boot_s * 1e9), int(wall_s * 1e9)
        return one

    now = pb.ClockPair(boot_id="b", boot_ns=int(700e9), wall_ns=int(1.7e18))
    assert elapsed_s([], now) == 0
    assert elapsed_s([at("b", 100, 5), at("b", 400, 1.7e9, 1)], now) == 600  # the wall clock said 5 s after 1970
    assert elapsed_s([at("a", 9000, 1.7e9 - 5000)], now) == 5000  # restarted, nothing has run since
    assert elapsed_s([at("a", 9000, 1.7e9 - 5000), at("b", 100, 1.7e9 - 600, 1)], now) == 5000
    assert elapsed_s([at("a", 9000, 1.7e9 + 5000), at("b", 100, 5, 1)], now) == 600  # and never negative


def test_what_cannot_be_watched_here_is_said_when_the_plan_is_handed_in() -> None:
    here = config.Config(Path("/nowhere"), bytes(16), bytes(32), "phone", "socket")
    cell = pb.Cell(gates=[pb.GateAsk(gate="screen")], watchdog=pb.WatchdogAsk(max_cpu_temp_c=95, load_s=9))
    plan = pb.Plan(cells=[cell, cell], limits=pb.Limits(min_battery_pct=20, total_s=9))
    refused = {"cpu_temp_c": "permission denied", "battery_pct": "no Termux:API", "screen": "no host"}
    assert warnings(plan, here, refused)[-3:] == [
        "gate screen cannot be read on this phone: no host",
        "watchdog: max_cpu_temp_c cannot be watched on this phone: permission denied",
        "limits: min_battery_pct cannot be watched on this phone: no Termux:API",
    ]
    assert not [text for text in warnings(plan, here, {}) if "cannot be" in text]
    off = pb.Plan(cells=[pb.Cell(watchdog=pb.WatchdogAsk(max_cpu_temp_c=0))])  # 0 switches a rule off
    assert not [text for text in warnings(off, here, refused) if "watched" in text]


def test_a_speed_probe_is_a_measurement_too(tmp_path: Path) -> None:
    initialise.init(tmp_path / "home")
    supervisor = Supervisor(tmp_path / "home", serve=False)
    try:
        assert supervisor.measuring() is None
        supervisor.context.gates.sources.probing = True
        assert supervisor.measuring() == Measuring(b"")
        before, _ = supervisor.context.spool.changed_since(0)
        supervisor.context.gates.sources.probe_ended()
        assert supervisor.context.spool.wait(before, 0)  # readers go on at once
    finally:
        supervisor.stop()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Supervisor]:
    """An agent that does not serve and whose night has not begun."""
    initialise.init(tmp_path / "home")
    made = Supervisor(tmp_path / "home", serve=False)
    yield made
    made.stop()


def many(cells: int) -> pb.Plan:
    asked = [pb.Cell(name=f"c{index}", model="m", prompt=b"x", index=index) for index in range(cells)]
    return pb.Plan(plan_id=PLAN, name="many", cells=asked, limits=pb.Limits(min_free_bytes=1 << 62))


def kept(agent: Supervisor) -> list[str]:
    return sorted(path.name for path in (agent.context.home / "plans").iterdir())


def test_a_plan_that_two_hosts_hand_in_at_once_is_here_once(agent: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    monkeypatch.setattr(night, "problems", lambda _plan: [""] * (both.wait(30) - 2))
    threads = [threading.Thread(target=agent.submit, args=(many(1),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept(agent) == [f"000001-{PLAN}.plan"]
    assert len(agent.listing()) == 1


def test_a_full_disk_refuses_a_plan_and_does_not_keep_one_from_being_cancelled(
    agent: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert agent.submit(many(1)).refused == []

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        other = many(1)
        other.plan_id = "cd" * 16
        (refused,) = agent.submit(other).refused
        assert "cannot keep the plan" in refused
        assert "No space left" in refused
        reply = agent.cancel(PLAN, only_current_cell=False)
    assert reply.cancelled
    assert "cancel again" in reply.detail
    assert [(plan.plan_id, plan.state) for plan in agent.listing()] == [(PLAN, "cancelled")]
    assert kept(agent) == [f"000001-{PLAN}.plan"]


def test_of_a_plan_that_waits_it_is_told_what_was_cancelled_of_it_and_not_of_another(agent: Supervisor) -> None:
    waiting = many(1)
    waiting.plan_id = "cd" * 16
    assert (agent.submit(many(1)).refused, agent.submit(waiting).refused) == ([], [])
    agent.night._current = PLAN  # as while one of its cells runs
    assert agent.cancel("", only_current_cell=True).detail == "the cell was cancelled"
    assert agent.cancel(waiting.plan_id, only_current_cell=False).detail == "the plan was cancelled before it began"
    assert agent.cancel(PLAN, only_current_cell=False).detail == "the plan was cancelled"


def test_a_plan_that_is_torn_is_left_out_and_stops_no_other(agent: Supervisor) -> None:
    agent.submit(many(3))
    folder = agent.context.home / "plans"
    whole = (folder / f"000001-{PLAN}.plan").read_bytes()
    for number, torn in enumerate((b"", whole[:10], whole[:40], b"\xff" * 100), 2):
        (folder / f"{number:06d}-{number:032x}.plan").write_bytes(torn)
    (folder / f"{PLAN}.state").write_text('{"state": "canc')
    assert [(plan.plan_id, plan.state) for plan in night.Night(agent.context).listing()] == [(PLAN, "queued")]


def test_an_agent_that_is_stopped_while_it_records_what_a_limit_left_unrun_goes_on_later(tmp_path: Path) -> None:
    """Ten thousand cells take minutes, and nobody waits minutes for an agent to stop."""
    initialise.init(tmp_path / "home")
    agent = Supervisor(tmp_path / "home", serve=False)
    agent.submit(many(2000))
    agent.start()
    wait_for(lambda: len(agent.context.spool.runs()) > 5, "some cells on record")
    began = time.monotonic()
    agent.stop()
    assert time.monotonic() - began < 10
    recorded = len(agent.context.spool.runs())
    assert recorded < 2000
    again = Supervisor(tmp_path / "home", serve=False)
    assert again.listing()[0].state == "queued"
    again.start()
    wait_for(lambda: len(again.context.spool.runs()) > recorded + 5, "more cells on record")
    again.stop()
