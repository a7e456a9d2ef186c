"""From a submitted plan to its end: what the database says of its runs, and when a phone is done with it.

In: the store, a plan's id, phones. Out: `CellNow` rows for showing progress, and `PlanFollower.finished`. Progress is read from the
database, not from the phone: while a cell is measured a phone sends its record and nothing else (law 7), and this way
it does not matter which collector drains it.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from bmoe_proto import calls
from sqlalchemy import func, select

from bmoe_collector.fleet.collector import Collector
from bmoe_collector.reach.routes import Reach, best_routes
from bmoe_collector.store.engine import Store
from bmoe_collector.store.schema import RUN_FACTS, RUNS, TOKENS_STDOUT

ASK_S = 2.0
RATE_OVER = 20
ENDED = {"done", "cancelled", "stopped"}
QUIET = {"", "idle", "between", "stopping"}


@dataclass(frozen=True, slots=True)
class CellNow:
    """One attempt of one cell on one phone, as stored so far."""

    run_id: str
    uuid: str
    cell: str
    cell_index: int
    attempt: int
    outcome: str
    cause: str
    ended: bool
    complete: bool
    tokens: int
    tok_s: float | None  # of the last tokens while it runs, of the run afterwards


def cells(store: Store, plan_id: str) -> list[CellNow]:
    """All attempts stored of a plan, in order."""
    asked = (
        select(RUNS, RUN_FACTS.c.tok_s)
        .outerjoin(RUN_FACTS, RUN_FACTS.c.run_no == RUNS.c.run_no)
        .where(RUNS.c.plan_id == plan_id)
        .order_by(RUNS.c.agent_uuid, RUNS.c.cell_index, RUNS.c.attempt, RUNS.c.run_no)
    )
    found = []
    with store.read() as connection:
        for row in connection.execute(asked).all():
            tokens, rate = row.n_tokens, row.tok_s
            if not row.ended:
                at = TOKENS_STDOUT.c.at
                of_run = TOKENS_STDOUT.c.run_no == row.run_no
                tokens = connection.execute(select(func.count()).where(of_run)).scalar() or 0
                recent = (
                    connection.execute(
                        select(TOKENS_STDOUT.c.boot_ns).where(of_run).order_by(at.desc()).limit(RATE_OVER)
                    )
                    .scalars()
                    .all()
                )
                rate = _rate([stamp for stamp in recent if stamp is not None])
            found.append(
                CellNow(
                    row.run_id,
                    row.agent_uuid or "",
                    row.cell or "",
                    row.cell_index or 0,
                    row.attempt or 1,
                    row.outcome,
                    row.cause or "",
                    bool(row.ended),
                    bool(row.complete),
                    int(tokens),
                    rate,
                )
            )
    return found


def last_attempts(found: list[CellNow]) -> list[CellNow]:
    """The attempt that counts, of every cell on every phone."""
    last = {(cell.uuid, cell.cell_index, cell.cell): cell for cell in found}
    return list(last.values())


class PlanFollower:
    """Knows when phones are done with a plan and everything of it is stored."""

    def __init__(self, store: Store, reach: Reach, collector: Collector, plan_id: str, uuids: list[bytes]) -> None:
        """The collector must be running for these phones, or another one hold their leases."""
        self._store = store
        self._reach = reach
        self._collector = collector
        self._plan_id = plan_id
        self._open = dict.fromkeys(uuids, 0.0)  # when to ask next, monotonic
        self.states: dict[bytes, str] = dict.fromkeys(uuids, "queued")
        self.why: dict[bytes, str] = {}

    def finished(self) -> bool:
        """Whether all phones are done and all their runs of the plan are stored whole."""
        now = time.monotonic()
        for uuid, ask_at in list(self._open.items()):
            phone = self._collector.board.get(uuid)
            if now >= ask_at and phone.doing in QUIET:
                self._open[uuid] = now + ASK_S
                if self._done(uuid):
                    del self._open[uuid]
        return not self._open

    def _done(self, uuid: bytes) -> bool:
        routes = best_routes([sighting for sighting in self._reach.sightings() if sighting.uuid == uuid])
        for route in routes.get(uuid, []):
            with contextlib.suppress(calls.CallError), contextlib.closing(self._reach.open(route)) as client:
                listing = client.listing()
                break
        else:
            return False
        plan = next((item for item in listing.plans if item.plan_id == self._plan_id), None)
        if plan is not None:
            self.states[uuid] = plan.state
            self.why[uuid] = plan.why
        if plan is not None and plan.state not in ENDED:
            return False
        # what the phone still lists of the plan must be here; what it deleted was acknowledged by this store
        here = {cell.run_id for cell in cells(self._store, self._plan_id) if cell.ended}
        there = [run for run in listing.runs if run.plan_id == self._plan_id]
        if not all(run.ended and run.run_id.hex() in here for run in there):
            return False
        phone = self._collector.board.get(uuid)
        return all(run.acknowledged for run in there) or phone.drained or phone.state == "held"


def _rate(stamps: list[int]) -> float | None:
    """Tokens a second between the first and the last of some stamps, the newest first."""
    if len(stamps) < 2 or stamps[0] <= stamps[-1]:
        return None
    return (len(stamps) - 1) / ((stamps[0] - stamps[-1]) / 1e9)
