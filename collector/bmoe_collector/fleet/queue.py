"""Plans for phones that are away: kept in the database, submitted by whoever drains the phone when it comes.

In: a `Plan` and a phone's uuid. Out: rows of the `queue` table, states `waiting`, `submitted`, `refused`, `removed`.
A plan's id makes submitting it again harmless: the agent answers `already`.
"""

from __future__ import annotations

from dataclasses import dataclass

from bmoe_proto.v1 import telemetry_pb2 as pb
from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError

from bmoe_collector.store.engine import Store, view, wall_ns
from bmoe_collector.store.schema import QUEUE


@dataclass(frozen=True, slots=True)
class Queued:
    """One plan waiting for one phone, or one that did."""

    queue_id: int
    plan_id: str
    plan_name: str
    cells: int
    uuid: str
    state: str
    why: str
    created_wall_ns: int


def enqueue(store: Store, plan: pb.Plan, uuid: bytes, why: str) -> bool:
    """Keep a plan for a phone; False when it waits there already."""
    now = wall_ns()
    row = {
        "plan_id": plan.plan_id,
        "agent_uuid": uuid.hex(),
        "plan": plan.SerializeToString(),
        "state": "waiting",
        "why": view(why),
        "created_wall_ns": now,
        "changed_wall_ns": now,
    }
    try:
        with store.write() as connection:
            connection.execute(insert(QUEUE).values(**row))
    except IntegrityError:
        return False
    return True


def waiting(store: Store, uuid: bytes) -> list[tuple[int, pb.Plan]]:
    """What waits for a phone, the oldest first."""
    asked = (
        select(QUEUE.c.queue_id, QUEUE.c.plan)
        .where(QUEUE.c.agent_uuid == uuid.hex(), QUEUE.c.state == "waiting")
        .order_by(QUEUE.c.queue_id)
    )
    with store.read() as connection:
        return [(int(row[0]), pb.Plan.FromString(bytes(row[1]))) for row in connection.execute(asked)]


def settle(store: Store, queue_id: int, state: str, why: str = "") -> None:
    """Say what became of an entry."""
    with store.write() as connection:
        connection.execute(
            update(QUEUE)
            .where(QUEUE.c.queue_id == queue_id)
            .values(state=state, why=view(why), changed_wall_ns=wall_ns())
        )


def listing(store: Store, *, everything: bool = False) -> list[Queued]:
    """Entries that wait, or all there ever were."""
    asked = select(QUEUE).order_by(QUEUE.c.queue_id)
    if not everything:
        asked = asked.where(QUEUE.c.state.in_(("waiting", "refused")))
    found = []
    with store.read() as connection:
        for row in connection.execute(asked):
            plan = pb.Plan.FromString(bytes(row.plan))
            found.append(
                Queued(
                    row.queue_id,
                    row.plan_id,
                    plan.name,
                    len(plan.cells),
                    row.agent_uuid or "",
                    row.state,
                    row.why or "",
                    row.created_wall_ns,
                )
            )
    return found
