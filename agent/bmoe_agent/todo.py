"""What of a plan is still to do, worked out from recorded runs alone. Pure.

In: a plan, one of its cells, summaries of runs. Out: the next cell and its attempt, or what ended the plan. Recorded runs are a
plan's only state, so an agent that is started again comes to the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from bmoe_proto.gates import STOPS
from bmoe_proto.outcome import Outcome
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent.spool import RunSummary

MAX_LOST = 5
"""A cell during which the phone died is run again, but not for ever: it may be what the phone dies of."""
UNRUN_CAUSES = tuple(f"gate:{name}" for name in STOPS)
"""Causes of the runs that stand for cells which a limit of their plan, or another cell's gate, kept from running."""


def next_attempt(cell: pb.Cell, runs: Sequence[RunSummary]) -> int | None:
    """Which attempt of a cell is to be run next, None when it is done. `runs` are the cell's own.

    By the design's table of outcomes: `partial`, `failed` and `killed` are tried again within the cell's bound unless
    the refusal was of the flags or the model, `lost` runs again, a cell our watchdog ended is tried again within the
    bound, and what the user, a gate, heat or the battery ended is done.
    """
    if not runs:
        return 1
    last = max(runs, key=lambda run: run.attempt)
    if not last.ended:  # could not even be closed; as good as lost
        return last.attempt + 1 if len(runs) < MAX_LOST else None
    outcome = Outcome(last.outcome, last.cause)
    lost = sum(1 for run in runs if run.outcome == "lost" and run.launched)
    if last.outcome == "lost":
        return last.attempt + 1 if lost < MAX_LOST else None
    again = outcome.retryable or (last.outcome == "aborted" and last.cause.startswith("watchdog:"))
    counted = sum(1 for run in runs if run.outcome != "lost")
    return last.attempt + 1 if again and counted <= cell.retries else None


def open_cells(plan: pb.Plan, runs: Iterable[RunSummary]) -> Iterator[tuple[pb.Cell, int]]:
    """The cells that are not done, in the plan's order, each with its next attempt."""
    by_cell: dict[int, list[RunSummary]] = {}
    for run in runs:
        if run.plan_id == plan.plan_id and run.started:
            by_cell.setdefault(run.cell_index, []).append(run)
    for cell in plan.cells:
        attempt = next_attempt(cell, by_cell.get(cell.index, []))
        if attempt is not None:
            yield cell, attempt


def next_cell(plan: pb.Plan, runs: Iterable[RunSummary]) -> tuple[pb.Cell, int] | None:
    """The first cell in the plan's order that is not done, and its attempt; None when the plan is done."""
    return next(open_cells(plan, runs), None)


def stops(plan: pb.Plan, runs: Iterable[RunSummary]) -> list[str]:
    """Causes of recorded runs that end a whole plan: a gate whose policy is `abort`, or what a stop left unrun."""
    found: list[str] = []
    for run in runs:
        if run.plan_id != plan.plan_id or run.outcome != "skipped" or run.cell_index >= len(plan.cells):
            continue
        gate = run.cause.removeprefix("gate:")
        asked = plan.cells[run.cell_index].gates
        if run.cause in UNRUN_CAUSES or any(ask.gate == gate and ask.policy == "abort" for ask in asked):
            found.append(run.cause)
    return found


def elapsed_s(runs: Iterable[RunSummary], now: pb.ClockPair) -> float:
    """Seconds since a plan's first cell began; `runs` are the plan's own. 0 without any.

    By the boot clock, which nobody sets; only the time between two boots is by the wall clock, which may be wrong then.
    """
    ordered = sorted((run for run in runs if run.started), key=lambda run: (run.cell_index, run.attempt))
    if not ordered:
        return 0.0
    first = ordered[0]
    here = next((run for run in ordered if run.boot_id == now.boot_id and run.started_boot_ns), None)
    if here is None:
        return max(0.0, (now.wall_ns - first.started_wall_ns) / 1e9)
    before_s = 0.0 if here is first else max(0.0, (here.started_wall_ns - first.started_wall_ns) / 1e9)
    return before_s + max(0.0, (now.boot_ns - here.started_boot_ns) / 1e9)
