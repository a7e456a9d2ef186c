"""Rows about a run that change while it is being received: the run itself, its segments, cursor, plan, phone.

In: an open transaction and a reader. Out: rows inserted or updated in place.
"""

from __future__ import annotations

from typing import Any

from bmoe_proto.v1 import telemetry_pb2 as pb
from sqlalchemy import BindParameter, Connection, bindparam, insert, select, update

from bmoe_collector.ingest import told
from bmoe_collector.ingest.reader import RunReader
from bmoe_collector.store.engine import insert_new, plain, wall_ns
from bmoe_collector.store.schema import CURSORS, DEVICES, LABELS, PLANS, RUNS, SEGMENTS

NOT_WHOLE = {"complete": False, "reasons": ["no end of the record yet"], "frames": 0, "gaps": 0}


def new_run(connection: Connection, run_id: str, source: str, **columns: Any) -> int:
    """Insert a run of which nothing is known yet; returns its number."""
    now = wall_ns()
    values: dict[str, Any] = {
        "run_id": run_id,
        "source": source,
        "outcome": "started",
        "exit_observed": False,
        "ended": False,
        "simulated": False,
        "unmeasured": False,
        "n_tokens": 0,
        "n_turns": 0,
        "complete": False,
        "completeness": NOT_WHOLE,
        "stored_wall_ns": now,
        "changed_wall_ns": now,
    }
    made = connection.execute(insert(RUNS), values | columns).inserted_primary_key
    assert made is not None
    return int(made[0])


# Statements of every batch are made once: making one costs more than running it.
_RUN: BindParameter[int] = bindparam("of_run")
_SEGMENT: BindParameter[str] = bindparam("of_segment")
_MOVE_CURSOR = update(CURSORS).where(CURSORS.c.run_no == _RUN, CURSORS.c.segment == _SEGMENT)
_CHANGE_SEGMENT = update(SEGMENTS).where(SEGMENTS.c.run_no == _RUN, SEGMENTS.c.segment == _SEGMENT)
_CHANGE_RUN = update(RUNS).where(RUNS.c.run_no == _RUN)
_PLACES = select(SEGMENTS.c.place).where(SEGMENTS.c.run_no == _RUN)
_OWNER = select(RUNS.c.agent_uuid).where(RUNS.c.run_no == _RUN)
_LABELS = select(LABELS.c.key, LABELS.c.value).where(LABELS.c.run_no == _RUN)
_DEVICE: BindParameter[str] = bindparam("of_device")
_DEVICE_FACTS = select(DEVICES.c.facts).where(DEVICES.c.agent_uuid == _DEVICE)
_CHANGE_DEVICE = update(DEVICES).where(DEVICES.c.agent_uuid == _DEVICE)


def change_run(connection: Connection, run_no: int, values: dict[str, Any]) -> None:
    """Replace columns of a run."""
    connection.execute(_CHANGE_RUN, {**values, "of_run": run_no})


def put_progress(connection: Connection, reader: RunReader, segment: str, agent_uuid: str) -> None:
    """The cursor and the state of the segment that was just read."""
    run_no, offset = reader.run_no, reader.offsets[segment]
    here = {"of_run": run_no, "of_segment": segment}
    if not connection.execute(_MOVE_CURSOR, {**here, "offset": offset}).rowcount:
        row = {"run_no": run_no, "segment": segment, "agent_uuid": agent_uuid, "offset": offset}
        connection.execute(insert(CURSORS), row)
    put_segment(connection, reader, segment)


def put_segment(connection: Connection, reader: RunReader, name: str) -> None:
    """What is known of a segment."""
    here = reader.segments[name]
    values = {
        "previous": here.previous,
        "frames": here.frames,
        "sha256": here.sha.hexdigest(),
        "opened": here.opened,
        "problem": here.problem,
    }
    of_segment = {"of_run": reader.run_no, "of_segment": name}
    if not connection.execute(_CHANGE_SEGMENT, {**values, **of_segment}).rowcount:
        place = max(connection.execute(_PLACES, {"of_run": reader.run_no}).scalars(), default=-1) + 1
        connection.execute(insert(SEGMENTS), {**values, "run_no": reader.run_no, "segment": name, "place": place})


def put_started(connection: Connection, reader: RunReader) -> None:
    """Plan, labels and phone of a run whose start was just read."""
    if reader.plan is not None:
        insert_new(connection, PLANS, reader.plan)
    put_labels(connection, reader.run_no, reader.labels, "plan")
    owner = connection.execute(_OWNER, {"of_run": reader.run_no}).scalar()
    # A phone speaks for itself alone.
    if reader.started is not None and owner and reader.started.device.agent_uuid.hex() == owner:
        put_device(connection, reader.started.device)


def put_labels(
    connection: Connection, run_no: int, labels: dict[str, str], source: str, *, force: bool = False
) -> None:
    """Add labels; one that is there already stays unless `force`."""
    if not labels:
        return
    known = {row[0]: row[1] for row in connection.execute(_LABELS, {"of_run": run_no})}
    wanted = {key[:128]: value for key, value in labels.items()}
    fresh = [
        {"run_no": run_no, "key": key, "value": value, "source": source}
        for key, value in wanted.items()
        if key not in known
    ]
    if fresh:
        connection.execute(insert(LABELS), fresh)
    for key, value in wanted.items() if force else ():
        if known.get(key, value) != value:
            here = (LABELS.c.run_no == run_no, LABELS.c.key == key)
            connection.execute(update(LABELS).where(*here).values(value=value, source=source))


def put_device(connection: Connection, device: pb.DeviceFacts, offers: dict[str, Any] | None = None) -> None:
    """A phone's facts, as it told them last. `offers`: what can be run there, when it told that too; else what it told before."""
    uuid = device.agent_uuid.hex()
    now = wall_ns()
    known = connection.execute(_DEVICE_FACTS, {"of_device": uuid}).scalar() or {}
    facts = plain(told.message(device))
    if offers := offers or known.get("offers"):
        facts["offers"] = offers
    values = {"facts": facts, "model": told.device_model(device), "last_seen_wall_ns": now}
    if not connection.execute(_CHANGE_DEVICE, {**values, "of_device": uuid}).rowcount:
        insert_new(connection, DEVICES, {"agent_uuid": uuid, "first_seen_wall_ns": now, **values})


def offers_of(status: pb.StatusReply) -> dict[str, Any] | None:
    """What can be run on a phone and what it can sense; None while it measures, when it does not look."""
    if not status.models and not status.gates:
        return None
    kept = pb.StatusReply(
        engines=status.engines,
        models=status.models,
        gates=status.gates,
        unreadable=status.unreadable,
        engine_facts=status.engine_facts,
        free_bytes=status.free_bytes,
    )
    return {"status": plain(told.message(kept)), "wall_ns": wall_ns()}
