"""What the probe writes into the database and asks of it: host samples, notes, and which runs want looking after.

A sample belongs to a run by the phone's clock: between its launch (two periods before it, for the entry state) and its
end. Rows are inserted when they come and get their run when its end is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bmoe_proto.v1 import telemetry_pb2 as pb
from sqlalchemy import Connection, and_, func, insert, or_, select, update

from bmoe_collector.ingest import ending, finish
from bmoe_collector.ingest.rebuild import read_again
from bmoe_collector.probe.reading import HostSample
from bmoe_collector.store.engine import Store, plain, view, wall_ns
from bmoe_collector.store.facts import forget_judgement
from bmoe_collector.store.schema import HOST_SAMPLES, NOTES, RUNS, SEGMENTS

LEAD_NS = 12_000_000_000
"""How long before the launch a sample still is the entry's."""
TAIL_NS = 6_000_000_000
SEARCHED = "kill_search"
KILL = "kill_evidence"
RECENT_NS = 3 * 86_400 * 10**9
"""Since a run was stored: no log of a phone reaches further back. Not by the phone's wall clock, which may be wrong."""


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run that has started and not ended, as far as the database knows."""

    run_no: int
    run_id: str
    boot_id: str
    launched: bool
    period_ms: int
    stop_apps: tuple[str, ...] = ()
    screen_on: bool = False
    pids: tuple[int, ...] = ()
    """Of the agents that recorded it and of the engine."""


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A run whose end may have left a line in the phone's log."""

    run_no: int
    run_id: str
    boot_id: str
    begin_wall_ns: int
    end_wall_ns: int
    end_boot_ns: int
    pids: tuple[int, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class HostNote:
    """A note of the host's about a run."""

    code: str
    text: str
    facts: dict[str, Any]
    boot_ns: int


def open_run(store: Store, agent_uuid: str) -> OpenRun | None:
    """The newest run of a phone that has no end yet."""
    query = (
        select(RUNS.c.run_no, RUNS.c.run_id, RUNS.c.boot_id, RUNS.c.launched_boot_ns, RUNS.c.sampling, RUNS.c.asked)
        .where(RUNS.c.agent_uuid == agent_uuid, RUNS.c.ended.is_(False), RUNS.c.started_boot_ns.is_not(None))
        .order_by(RUNS.c.run_no.desc())
        .limit(1)
    )
    with store.read() as connection:
        row = connection.execute(query).first()
        if row is None:
            return None
        pids = _pids(connection, row.run_no)
    sampling, asked = row.sampling or {}, row.asked or {}
    return OpenRun(
        row.run_no,
        row.run_id,
        row.boot_id or "",
        row.launched_boot_ns is not None,
        int(sampling.get("host_probe_period_ms", 5000)),
        tuple(str(name) for name in asked.get("stop_apps", ())),
        bool(asked.get("screen_on", False)),
        pids,
    )


def _pids(connection: Connection, run_no: int) -> tuple[int, ...]:
    """The engine's pid, and those of the agents that wrote the record."""
    opened = connection.execute(select(SEGMENTS.c.opened).where(SEGMENTS.c.run_no == run_no)).scalars()
    found = [int(facts["pid"]) for facts in opened if facts and facts.get("pid")]
    launched = connection.execute(
        select(NOTES.c.facts).where(NOTES.c.run_no == run_no, NOTES.c.code.in_(("launched", "adopted")))
    ).scalars()
    found += [int(facts["pid"]) for facts in launched if facts and str(facts.get("pid", "")).isdigit()]
    return tuple(dict.fromkeys(found))


def put_sample(store: Store, agent_uuid: str, boot_id: str, sample: HostSample) -> None:
    """Keep a sample."""
    row = {
        "agent_uuid": agent_uuid,
        "boot_ns": sample.boot_ns,
        "uncertainty_ns": sample.uncertainty_ns,
        "boot_id": boot_id or None,
        "kind": sample.kind,
        "took_ms": sample.took_ms,
        "values": plain(sample.values),
        "refused": {node: view(reason) for node, reason in sample.refused.items()} or None,
        "text": sample.text,
    }
    with store.write() as connection:
        connection.execute(insert(HOST_SAMPLES).values(**row))


def attach_ended(store: Store, agent_uuid: str) -> list[tuple[int, str]]:
    """Give a phone's ended runs the samples of their windows that have no run yet; returns those runs' numbers and ids.

    May be called after every end, and makes up for a collector that was killed before it did.
    """
    low = func.coalesce(RUNS.c.launched_boot_ns - LEAD_NS, RUNS.c.started_boot_ns)
    inside = and_(
        HOST_SAMPLES.c.agent_uuid == agent_uuid,
        HOST_SAMPLES.c.run_no.is_(None),
        HOST_SAMPLES.c.boot_ns.between(low, RUNS.c.ended_boot_ns + TAIL_NS),
        HOST_SAMPLES.c.boot_id == RUNS.c.boot_id,
    )
    query = (
        select(RUNS.c.run_no, RUNS.c.run_id)
        .where(RUNS.c.agent_uuid == agent_uuid, RUNS.c.ended.is_(True), RUNS.c.stored_wall_ns > wall_ns() - RECENT_NS)
        .where(select(HOST_SAMPLES.c.sample_no).where(inside).exists())
        .order_by(RUNS.c.run_no)
    )
    with store.read() as connection:
        waiting = [(int(run_no), str(run_id)) for run_no, run_id in connection.execute(query)]
    if not waiting:
        return []
    with store.write() as connection:
        for run_no, _ in waiting:
            mine = select(HOST_SAMPLES.c.sample_no).where(inside, RUNS.c.run_no == run_no)
            connection.execute(update(HOST_SAMPLES).where(HOST_SAMPLES.c.sample_no.in_(mine)).values(run_no=run_no))
            forget_judgement(connection, run_no)
    return waiting


def unsearched(store: Store, agent_uuid: str) -> list[EndedRun]:
    """Ended runs of a phone whose end asks for a look into its log, and that have had none.

    Signals that were not ours, ends that nobody saw, and runs during which the agent was started again.
    """
    looked = select(NOTES.c.run_no).where(NOTES.c.run_no == RUNS.c.run_no, NOTES.c.code == SEARCHED).exists()
    restarted = (
        select(SEGMENTS.c.run_no)
        .where(SEGMENTS.c.run_no == RUNS.c.run_no, SEGMENTS.c.previous.is_not(None), SEGMENTS.c.previous != "")
        .exists()
    )
    not_ours = and_(RUNS.c.signal.is_not(None), RUNS.c.ended_by != "agent")
    unseen = and_(RUNS.c.launched.is_(True), RUNS.c.exit_observed.is_(False))
    query = (
        select(RUNS)
        .where(RUNS.c.agent_uuid == agent_uuid, RUNS.c.source == "agent", RUNS.c.ended.is_(True), ~looked)
        .where(or_(RUNS.c.outcome.in_(("killed", "lost")), not_ours, unseen, restarted))
        .where(RUNS.c.stored_wall_ns > wall_ns() - RECENT_NS)
        .order_by(RUNS.c.run_no)
    )
    found = []
    with store.read() as connection:
        for row in connection.execute(query).all():
            end = row.ended_wall_ns or row.started_wall_ns
            found.append(
                EndedRun(
                    row.run_no,
                    row.run_id,
                    row.boot_id or "",
                    row.started_wall_ns,
                    end,
                    row.ended_boot_ns or row.started_boot_ns or 0,
                    _pids(connection, row.run_no),
                )
            )
    return found


def put_notes(store: Store, run_no: int, notes: Sequence[HostNote]) -> None:
    """Add notes of the host's to a run; kill evidence makes its outcome anew. Notes survive a reparse of the phone's record."""
    with store.write() as connection:
        known = select(func.max(NOTES.c.at)).where(NOTES.c.run_no == run_no, NOTES.c.at >= finish.HOST_NOTES)
        at = int(connection.execute(known).scalar() or finish.HOST_NOTES - 1)
        for note in notes:
            at += 1
            connection.execute(
                insert(NOTES).values(
                    run_no=run_no,
                    at=at,
                    boot_ns=note.boot_ns,
                    source="host",
                    code=view(note.code),
                    text=view(note.text),
                    facts=plain({**note.facts, "source": "host"}),
                )
            )
        if any(note.code == KILL for note in notes):
            decide_again(connection, run_no)


def decide_again(connection: Connection, run_no: int) -> None:
    """Outcome, cause and evidence of an ended run from its record and what hosts have found since."""
    run_id = connection.execute(select(RUNS.c.run_id).where(RUNS.c.run_no == run_no)).scalar_one()
    reader = read_again(connection, run_no, run_id)
    reader.sink.forget()
    if reader.ended is None:
        return
    finish.add_host_evidence(connection, reader)
    values = ending.columns(reader)
    changed = {name: values[name] for name in ("outcome", "cause", "evidence")}
    connection.execute(update(RUNS).where(RUNS.c.run_no == run_no).values(**changed, changed_wall_ns=wall_ns()))
    forget_judgement(connection, run_no)


def note_message(note: HostNote, run_id: str) -> pb.Note:
    """The same for the phone: which run it is about stands in its facts."""
    import json

    facts = plain({**note.facts, "source": "host", "run_id": run_id})
    return pb.Note(code=note.code, text=view(note.text), facts_json=json.dumps(facts, allow_nan=False))
