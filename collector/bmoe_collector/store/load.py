"""A stored run as plain values: `load_run(store, run_id) -> RunRecord`.

In: the store and a run's full id. Out: everything stored of it, for both sources (an agent's record, imported files).
All of it is read in one transaction, so it is of one moment. Tokens come as columns under the contract's names; columns
the source did not have are left out, unknown ones are there under their own name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Table, select

from bmoe_collector.record import (
    ArtifactRecord,
    GateRecord,
    NoteRecord,
    ReportLine,
    ResidencyRecord,
    Rows,
    RunRecord,
    SampleRecord,
    TurnRecord,
)
from bmoe_collector.store import schema as tables
from bmoe_collector.store.engine import Store
from bmoe_collector.store.find import RunNotFoundError, find
from bmoe_collector.store.names import CSV_COLUMNS, PROGRESS_COLUMNS, SUMMARY_COLUMNS

NOT_IN_RUN = frozenset({"ready", "sidecar", "observer", "completeness", "run_no"})


def load_run(store: Store, run_id: str) -> RunRecord:
    """Everything stored of a run; raises RunNotFoundError."""
    with store.read() as connection:
        run_no, _ = find(connection, run_id)
        return load(connection, run_no)


def load_runs(store: Store, run_ids: Iterable[str]) -> list[RunRecord]:
    """Several runs, in the order asked."""
    with store.read() as connection:
        return [load(connection, find(connection, run_id)[0]) for run_id in run_ids]


def load(connection: Connection, run_no: int) -> RunRecord:
    """As `load_run`, inside a transaction that is open."""
    row = connection.execute(select(tables.RUNS).where(tables.RUNS.c.run_no == run_no)).mappings().one_or_none()
    if row is None:
        raise RunNotFoundError(f"no run number {run_no} is stored here", [])
    run = {name: value for name, value in row.items() if name not in NOT_IN_RUN}
    if run["prompt"] is not None:
        run["prompt"] = bytes(run["prompt"])
    run["labels"] = {each["key"]: each["value"] for each in _rows(connection, tables.LABELS, run_no, "key")}
    run["facts"] = _one(connection, tables.RUN_FACTS, run_no, "facts") or {}
    config = _one(connection, tables.CONFIGS, run_no, "keys") or {}
    stdout, loads = _stdout(connection, run_no)
    turns = _turns(connection, run_no)
    if not row["ended"] and row["source"] == "agent":
        turns += _open_turn(connection, run_no, turns)
    return RunRecord(
        run=run,
        preamble=config,
        csv=_csv(connection, run_no),
        stdout=stdout,
        turns=turns,
        report=[
            ReportLine(each["name"], each["facts"], each["text"], each["turn"])
            for each in _rows(connection, tables.REPORT_LINES, run_no)
        ],
        trailers=[each["keys"] for each in _rows(connection, tables.TRAILERS, run_no)],
        ready=row["ready"] or {},
        loads=loads,
        others=[each["text"] for each in _rows(connection, tables.OTHER_LINES, run_no)],
        samples=_samples(connection, run_no),
        residency=[
            ResidencyRecord(
                each["boot_ns"],
                each["part"],
                each["method"],
                each["problem"],
                each["bytes"],
                each["fraction"],
                each["standard_error"],
                each["cost_ms"],
            )
            for each in _rows(connection, tables.RESIDENCY, run_no)
        ],
        gates=[
            GateRecord(
                each["gate"],
                each["asked"],
                each["bound"],
                each["last"],
                each["unit"],
                each["state"],
                each["waited_s"],
                each["policy"],
                each["readings"],
            )
            for each in _rows(connection, tables.GATES, run_no)
        ],
        notes=_notes(connection, run_no),
        artifacts=[
            ArtifactRecord(each["name"], each["kind"], each["size"], each["sha256"])
            for each in _rows(connection, tables.ARTIFACTS, run_no, "name")
            if each["state"] in ("stored", "archived")
        ],
        sidecar=row["sidecar"] or {},
        observer=row["observer"] or {},
        completeness=row["completeness"] or {},
    )


def _rows(connection: Connection, table: Table, run_no: int, order: str = "at") -> Sequence[Mapping[str, Any]]:
    query = select(table).where(table.c.run_no == run_no).order_by(table.c[order])
    return [dict(row) for row in connection.execute(query).mappings()]


def _one(connection: Connection, table: Table, run_no: int, column: str) -> Any:
    return connection.execute(select(table.c[column]).where(table.c.run_no == run_no)).scalar()


def _columns(connection: Connection, table: Table, run_no: int, names: Sequence[str]) -> dict[str, list[Any]]:
    """Columns of a token table; `extra` is spread under its own names."""
    chosen = [table.c[name] for name in names]
    rows = connection.execute(select(*chosen, table.c.extra).where(table.c.run_no == run_no).order_by(table.c.at)).all()
    if not rows:
        return {}
    *known, extras = (list(column) for column in zip(*rows, strict=True))
    columns: dict[str, list[Any]] = dict(zip(names, known, strict=True))
    for at, extra in enumerate(extras):
        if extra is None:
            continue
        for name, value in extra.items():
            columns.setdefault(name, [None] * len(rows))[at] = value
    return columns


def _present(columns: dict[str, list[Any]], always: Sequence[str]) -> dict[str, list[Any]]:
    """Leave out the columns that hold nothing: the source did not have them, or nothing was measured."""
    return {
        name: values for name, values in columns.items() if name in always or any(value is not None for value in values)
    }


def _csv(connection: Connection, run_no: int) -> Rows:
    columns = _columns(connection, tables.TOKENS_CSV, run_no, list(CSV_COLUMNS))
    return Rows(_present(columns, ("turn", "step"))) if columns else Rows()


def _stdout(connection: Connection, run_no: int) -> tuple[Rows, list[dict[str, Any]]]:
    names = ["turn", *PROGRESS_COLUMNS, "boot_ns", "uncertainty_ns", "load_mb", "load_ms"]
    columns = _columns(connection, tables.TOKENS_STDOUT, run_no, names)
    if not columns:
        return Rows(), []
    mb, ms = columns.pop("load_mb"), columns.pop("load_ms")
    keys = zip(columns["turn"], columns["step"], mb, ms, strict=True)
    loads = [
        {"turn": turn, "step": step, "mb": size, "ms": took}
        for turn, step, size, took in keys
        if size is not None or took is not None
    ]
    return Rows(_present(columns, ("turn", "step"))), loads


def _turns(connection: Connection, run_no: int) -> list[TurnRecord]:
    turns: list[TurnRecord] = []
    for row in _rows(connection, tables.TURNS, run_no):
        summary = {name: row[name] for name in SUMMARY_COLUMNS if row[name] is not None}
        summary |= row["extra"] or {}
        if row["kind"] in ("generate", "oneshot") and row["tokens"] is not None and row["state"] != "not_run":
            summary.setdefault("tokens", row["tokens"])
        turns.append(
            TurnRecord(
                turn=row["turn"],
                request_id=row["request_id"],
                tokens=row["tokens"],
                cancelled=bool(row["cancelled"]),
                text=bytes(row["text"]),
                reasoning=bytes(row["reasoning"]),
                summary=summary,
                decide=row["decide"],
                error=row["error"],
                request=row["request"],
                state=row["state"],
                begin_boot_ns=row["begin_boot_ns"],
                end_boot_ns=row["end_boot_ns"],
            )
        )
    return turns


def _open_turn(connection: Connection, run_no: int, turns: Sequence[TurnRecord]) -> list[TurnRecord]:
    """The turn that is being generated now, from its deltas."""
    table = tables.TOKENS_STDOUT
    last = max((turn.turn for turn in turns if turn.turn is not None), default=-1)
    rows = connection.execute(
        select(table.c.turn, table.c.reset, table.c.delta_text, table.c.delta_reasoning, table.c.boot_ns)
        .where(table.c.run_no == run_no, table.c.turn > last)
        .order_by(table.c.at)
    ).all()
    if not rows:
        return []
    text, reasoning = bytearray(), bytearray()
    for row in rows:
        if row.reset:
            text.clear()
            reasoning.clear()
        text += row.delta_text or b""
        reasoning += row.delta_reasoning or b""
    return [
        TurnRecord(
            rows[0].turn, None, len(rows), False, bytes(text), bytes(reasoning), state="began", begin_boot_ns=None
        )
    ]


def _samples(connection: Connection, run_no: int) -> list[SampleRecord]:
    samples = [
        SampleRecord(row["boot_ns"], row["source"], row["kind"], row["values"], row["took_ms"], row["refused"] or {})
        for row in _rows(connection, tables.SAMPLES, run_no)
    ]
    host = connection.execute(
        select(tables.HOST_SAMPLES)
        .where(tables.HOST_SAMPLES.c.run_no == run_no)
        .order_by(tables.HOST_SAMPLES.c.boot_ns, tables.HOST_SAMPLES.c.sample_no)
    ).mappings()
    samples += [
        SampleRecord(row["boot_ns"], "host", row["kind"], row["values"], row["took_ms"], row["refused"] or {})
        for row in host
    ]
    samples.sort(key=lambda sample: sample.boot_ns)
    return samples


def _notes(connection: Connection, run_no: int) -> list[NoteRecord]:
    notes = [
        NoteRecord(row["boot_ns"], row["code"], row["text"], row["facts"], row["source"])
        for row in _rows(connection, tables.NOTES, run_no)
    ]
    for row in _rows(connection, tables.GAPS, run_no):
        facts = {name: row[name] for name in ("what", "frames", "bytes", "lost_segment", "declared")}
        notes.append(NoteRecord(row["boot_ns"], "gap", row["why"], facts, "agent" if row["declared"] else "store"))
    return notes


def canonical(record: RunRecord) -> str:
    """A record as one JSON text: two runs with the same text hold the same (for tests and `bmoe db check`)."""
    from dataclasses import asdict

    def default(value: Any) -> Any:
        return value.hex() if isinstance(value, bytes) else str(value)

    return json.dumps(asdict(record), sort_keys=True, default=default)
