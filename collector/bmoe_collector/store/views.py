"""SQL views over the store: what `bmoe sql`, notebooks and other tools read. The same names, types and answers on both
databases.

In: the tables, the contract's table of columns, the table of facts. Out: `views()`, each with its columns documented and
its SELECT by dialect. `standing_views.py` puts them into a database.

In every view `run_id` names the run and `run_no` is its number in this store; yes and no are 1 and 0; JSON is text;
unmeasured is NULL; times are nanoseconds, of the phone's boot clock unless named wall. A zero that means "this platform
cannot report" is still a zero here: only derived facts in `v_runs` have that rule applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from bmoe_proto.contract import columns as contract
from sqlalchemy import BigInteger, ColumnElement, Integer, Table, cast, literal_column, select
from sqlalchemy.dialects import postgresql, sqlite

from bmoe_collector.store import names, schema


@dataclass(frozen=True, slots=True)
class ViewColumn:
    """One column: "int", "float", "str" or "bool" (1 and 0 in SQL, a boolean in frames and Parquet)."""

    name: str
    kind: str
    unit: str
    doc: str


@dataclass(frozen=True, slots=True)
class View:
    """One view: what a row is, its columns, and its SELECT by dialect."""

    name: str
    doc: str
    columns: tuple[ViewColumn, ...]
    sql: Mapping[str, str]


_C = ViewColumn
_RUN = (_C("run_no", "int", "", "the run's number in this store"), _C("run_id", "str", "", "32 hex digits"))
_AT = _C("at", "int", "", "place in its source, from 0")
_BOOT = _C("boot_ns", "int", "ns", "the phone's boot clock")
DIALECTS = ("sqlite", "postgresql")


@cache
def views() -> Mapping[str, View]:
    """Every view by name."""
    found = (
        _runs(), _tokens(), _turns(), _samples(), _residency(), _verdicts(), _labels(), _gates(), _notes(), _reports(),
        _artifacts(), _devices(),
    )  # fmt: skip
    return {view.name: view for view in found}


def _quoted(name: str) -> str:
    return f'"{name}"'


def _same(sql: str) -> dict[str, str]:
    return dict.fromkeys(DIALECTS, sql)


def _text(sql: str) -> str:
    """JSON as text, on both."""
    return f"CAST({sql} AS TEXT)"


def _whole(sql: str) -> str:
    """Booleans as 1 and 0, on both."""
    return f"CAST({sql} AS INTEGER)"


def _runs() -> View:
    from bmoe_collector.query.fields import RUN_FIELDS, device, expression, fields, source

    columns = list(_RUN)
    selected: dict[str, list[ColumnElement[Any]]] = {
        dialect: [schema.RUNS.c.run_no, schema.RUNS.c.run_id] for dialect in DIALECTS
    }

    def add(column: ViewColumn, *made: ColumnElement[Any]) -> None:
        """One expression for both databases, or one each."""
        columns.append(column)
        for dialect, each in zip(DIALECTS, made * (2 // len(made)), strict=True):
            selected[dialect].append(each.label(column.name))

    for name, field in fields().items():
        if name in {"run_id", "started", "labels", "verdicts"}:
            continue
        labelled = device() if name == "device" else expression(name)
        inner: ColumnElement[Any] = getattr(labelled, "element", labelled)
        if field.kind == "bool" and name in RUN_FIELDS:
            inner = cast(inner, Integer)
        elif field.kind in {"int", "bool"} and field.source == "fact":
            inner = cast(inner, BigInteger)
        add(ViewColumn(name, field.kind, field.unit, field.doc), inner)
    add(
        _C("started_utc", "str", "", "start, YYYY-MM-DD HH:MM:SS"),
        literal_column("datetime(runs.started_wall_ns / 1000000000, 'unixepoch')"),
        literal_column(
            "to_char(to_timestamp(runs.started_wall_ns / 1000000000) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')"
        ),
    )
    listed = "FROM (SELECT v.code, v.at FROM verdicts v WHERE v.run_no = runs.run_no ORDER BY v.at) AS listed"
    add(
        _C("verdicts", "str", "", "codes, gravest first, a space between; null without one"),
        literal_column(f"(SELECT group_concat(code, ' ') {listed})"),
        literal_column(f"(SELECT string_agg(code, ' ' ORDER BY at) {listed})"),
    )
    gravest = (
        "(SELECT CASE MAX(CASE v.severity WHEN 'fail' THEN 3 WHEN 'warn' THEN 2 ELSE 1 END) WHEN 3 THEN 'fail'"
        " WHEN 2 THEN 'warn' WHEN 1 THEN 'info' END FROM verdicts v WHERE v.run_no = runs.run_no)"
    )
    add(_C("severity", "str", "", "gravest verdict: fail, warn, info; null without one"), literal_column(gravest))
    add(_C("argv", "str", "", "the engine's argv, JSON"), literal_column(_text("runs.argv")))
    add(
        _C("completeness", "str", "", "reasons, frame and gap counts, JSON"), literal_column(_text("runs.completeness"))
    )
    add(_C("stored_wall_ns", "int", "ns", "first stored here"), schema.RUNS.c.stored_wall_ns)
    add(_C("changed_wall_ns", "int", "ns", "last changed here"), schema.RUNS.c.changed_wall_ns)
    made: dict[str, Any] = {"sqlite": sqlite.dialect(), "postgresql": postgresql.dialect()}  # type: ignore[no-untyped-call]
    return View(
        "v_runs",
        "One row a run: who, what, when, how it ended; its configuration (keys of the preamble) and derived facts.",
        tuple(columns),
        {
            name: str(
                select(*selected[name])
                .select_from(source())
                .compile(dialect=made[name], compile_kwargs={"literal_binds": True})
            )
            for name in DIALECTS
        },
    )


def _tokens() -> View:
    """Both sources of tokens, the CSV's value standing (design: each source keeps its own table, the merge is a query)."""
    csv = {name: contract.METRICS[name] for name in names.CSV_COLUMNS}
    out = {name: contract.PROGRESS[name] for name in names.PROGRESS_COLUMNS}
    both = {**csv, **{name: column for name, column in out.items() if name not in csv}}
    columns = [*_RUN, _C("source", "str", "", "csv, stdout or both: which sources have the token")]
    first, alone = ["'both'"], ["'stdout'"]
    keys = ("turn", "step")
    for name, column in {"turn": csv["turn"], "step": csv["step"], **both}.items():
        columns.append(ViewColumn(name, column.type, column.unit, column.doc))
        here, there = f"c.{_quoted(name)}", f"s.{_quoted(name)}"
        if name in keys or name not in out:
            first.append(here)
        else:
            first.append(f"COALESCE({here}, {there})" if name in csv else there)
        alone.append(there if name in out or name == "turn" else f"CAST(NULL AS {_SQL[column.type]})")
    for name, kind, unit, doc in (
        ("load_mb", "float", "MiB", "BMOE_LOAD's mb"),
        ("load_ms", "float", "ms", "BMOE_LOAD's ms"),
        ("boot_ns", "int", "ns", "when the line was seen, the phone's boot clock"),
        ("uncertainty_ns", "int", "ns", "it was written at most so long before"),
    ):
        columns.append(ViewColumn(name, kind, unit, doc))
        first.append(f"s.{name}")
        alone.append(f"s.{name}")
    columns.append(_C("extra", "str", "", "columns the contract does not know, JSON"))
    first.append(_text("COALESCE(CAST(c.extra AS TEXT), CAST(s.extra AS TEXT))"))
    alone.append(_text("s.extra"))
    first[0] = "CASE WHEN s.run_no IS NULL THEN 'csv' ELSE 'both' END"
    # A token is usually at the same place in both sources; only where it is not is the run searched for it.
    place = (
        "COALESCE((SELECT y.at FROM tokens_stdout y WHERE y.run_no = c.run_no AND y.at = c.at AND y.turn = c.turn AND"
        " y.step = c.step), (SELECT MAX(z.at) FROM tokens_stdout z WHERE z.run_no = c.run_no AND z.turn = c.turn AND"
        " z.step = c.step))"
    )
    sql = (  # nothing in it but names of ours
        f"SELECT r.run_no, r.run_id, {_named(first, columns)} FROM runs r JOIN tokens_csv c ON c.run_no = r.run_no"  # noqa: S608
        f" LEFT JOIN tokens_stdout s ON s.run_no = c.run_no AND s.at = {place}"
        f" UNION ALL SELECT r.run_no, r.run_id, {_named(alone, columns)} FROM runs r"
        " JOIN tokens_stdout s ON s.run_no = r.run_no"
        " WHERE NOT EXISTS (SELECT 1 FROM tokens_csv c WHERE c.run_no = s.run_no AND c.at = s.at AND c.turn = s.turn"
        " AND c.step = s.step) AND NOT EXISTS (SELECT 1 FROM tokens_csv c WHERE c.run_no = s.run_no AND c.turn = s.turn"
        " AND c.step = s.step)"
    )
    return View(
        "v_tokens",
        "One row a token, merged from the metrics CSV and stdout; where both give a value the CSV's stands."
        " Filter by run_no or run_id; a large store's tokens are read per run.",
        tuple(columns),
        _same(sql),
    )


_SQL = {"int": "BIGINT", "float": "DOUBLE PRECISION", "str": "TEXT", "bool": "INTEGER"}


def _named(values: list[str], columns: list[ViewColumn]) -> str:
    return ", ".join(
        f"{value} AS {_quoted(column.name)}" for value, column in zip(values, columns[len(_RUN) :], strict=True)
    )


def _turns() -> View:
    columns = [
        *_RUN, _AT,
        _C("turn", "int", "", "as the engine counts; null for a rejected request"),
        _C("request_id", "int", "", "the session's id"),
        _C("kind", "str", "", "generate, decide, oneshot or rejected"),
        _C("state", "str", "", "done, decided, cancelled, rejected, not_run, fatal, began or sent"),
        _C("tokens", "int", "tokens", "generated"),
        _C("cancelled", "bool", "", "interrupted by a cancel"),
        _C("text", "str", "", "the answer; invalid UTF-8 as U+FFFD, NUL as U+2400"),
        _C("text_bytes", "int", "bytes", "length of the answer"),
        _C("reasoning_bytes", "int", "bytes", "length of the reasoning"),
        _C("decide", "str", "", "BMOE_DECIDE, JSON"),
        _C("error", "str", "", "BMOE_ERROR, JSON"),
        _C("begin_boot_ns", "int", "ns", "BMOE_BEGIN seen"),
        _C("end_boot_ns", "int", "ns", "end record seen"),
    ]  # fmt: skip
    values = [
        "t.at", "t.turn", "t.request_id", "t.kind", "t.state", "t.tokens", _whole("t.cancelled"), "t.text_view",
        "length(t.text)", "length(t.reasoning)", _text("t.decide"), _text("t.error"), "t.begin_boot_ns", "t.end_boot_ns",
    ]  # fmt: skip
    documented = {column.done: column for column in contract.TRAILER.values()} | dict(contract.DONE.items())
    for name, kind in names.SUMMARY_COLUMNS.items():
        told = documented.get(name)
        columns.append(ViewColumn(name, kind, told.unit if told else "", told.doc if told else ""))
        values.append(f"t.{_quoted(name)}")
    return View(
        "v_turns",
        "One row a generation, decision or rejected request, with the BMOE_DONE keys (trailer keys mapped on them).",
        tuple(columns),
        _same(
            f"SELECT r.run_no, r.run_id, {_named(values, columns)} FROM runs r JOIN turns t ON t.run_no = r.run_no"  # noqa: S608
        ),
    )


_SAMPLE_DOCS = {
    "rss_kib": "VmRSS", "rss_anon_kib": "RssAnon", "rss_file_kib": "RssFile", "swap_kib": "VmSwap",
    "minflt": "minor faults of the engine so far", "majflt": "major faults of the engine so far",
    "utime_ticks": "user CPU so far", "stime_ticks": "system CPU so far", "last_cpu": "core it last ran on",
    "io_read_bytes": "bytes read from storage so far", "run_ns": "time on a CPU so far",
    "run_wait_ns": "time ready but waiting for a CPU so far", "mem_available_kib": "MemAvailable",
    "mem_free_kib": "MemFree", "mem_swap_free_kib": "SwapFree", "cpu_temp_c": "hottest CPU zone",
    "clock_cap_ratio": "lowest scaling_max_freq / cpuinfo_max_freq", "battery_pct": "charge",
}  # fmt: skip
_SAMPLE_UNITS = {"kib": "KiB", "ns": "ns", "ticks": "ticks", "bytes": "bytes", "c": "°C", "pct": "%", "ratio": "1"}


def _samples() -> View:
    columns = [
        *_RUN, _BOOT,
        _C("source", "str", "", "agent: read on the phone; host: read through adb"),
        _C("kind", "str", "", "fast, entry, exit, launch, turn or idle"),
        _C("took_ms", "float", "ms", "reading it took"),
    ]  # fmt: skip
    for name, kind in names.SAMPLE_COLUMNS.items():
        columns.append(ViewColumn(name, kind, _SAMPLE_UNITS.get(name.rsplit("_", 1)[-1], ""), _SAMPLE_DOCS[name]))
    columns.append(_C("all_values", "str", "", "every value by its name, JSON"))
    columns.append(_C("refused", "str", "", "what could not be read and why, JSON"))
    own = ["t.boot_ns", "t.source", "t.kind", "t.took_ms"]
    own += [f"t.{_quoted(name)}" for name in names.SAMPLE_COLUMNS]
    own += [_text('t."values"'), _text("t.refused")]
    sql: dict[str, str] = {}
    for dialect in DIALECTS:
        host = ["t.boot_ns", "'host'", "t.kind", "t.took_ms"]
        for name, kind in names.SAMPLE_COLUMNS.items():
            held = f"json_extract(t.\"values\", '$.{name}')" if dialect == "sqlite" else f"(t.\"values\" ->> '{name}')"
            number = f"CAST({held} AS DOUBLE PRECISION)"
            host.append(f"CAST({number} AS BIGINT)" if kind == "int" else number)
        host += [_text('t."values"'), _text("t.refused")]
        sql[dialect] = (
            f"SELECT r.run_no, r.run_id, {_named(own, columns)} FROM runs r JOIN samples t ON t.run_no = r.run_no"  # noqa: S608
            f" UNION ALL SELECT r.run_no, r.run_id, {_named(host, columns)} FROM runs r"
            " JOIN host_samples t ON t.run_no = r.run_no"
        )
    return View(
        "v_samples",
        "One row a reading of the kernel, on the phone's clock, by the agent or by the host's probe.",
        tuple(columns),
        sql,
    )


def _plain_view(name: str, table: Table, doc: str, docs: Mapping[str, tuple[str, str]]) -> View:
    """A table's own columns with the run's id in front."""
    columns = list(_RUN)
    values = []
    for column, (unit, told) in docs.items():
        kind = _kind(table, column)
        columns.append(ViewColumn(column, "str" if kind == "json" else kind, unit, told))
        held = f"t.{_quoted(column)}"
        values.append(_text(held) if kind == "json" else _whole(held) if kind == "bool" else held)
    sql = f"SELECT r.run_no, r.run_id, {_named(values, columns)} FROM runs r JOIN {table.name} t ON t.run_no = r.run_no"  # noqa: S608
    return View(name, doc, tuple(columns), _same(sql))


def _kind(table: Table, column: str) -> str:
    if type(table.c[column].type).__name__ == "JSON":
        return "json"
    return {bool: "bool", int: "int", float: "float"}.get(table.c[column].type.python_type, "str")


def _residency() -> View:
    return _plain_view(
        "v_residency", schema.RESIDENCY, "One row a look at a part of the model file: how much of it is in memory.",
        {
            "boot_ns": ("ns", _BOOT.doc), "part": ("", "whole, dense, expert, layer:N or other"),
            "method": ("", "sample, sweep or unavailable"), "problem": ("", "why it is not known"),
            "bytes": ("bytes", "size of the part"), "pages": ("pages", "of the part"),
            "pages_looked_at": ("pages", "looked at"), "pages_resident": ("pages", "of those, in memory"),
            "fraction": ("1", "in memory, estimated"), "standard_error": ("1", "of the estimate; 0 for a sweep"),
            "cost_ms": ("ms", "looking took"), "cpu_ms": ("ms", "of CPU"),
        },
    )  # fmt: skip


def _verdicts() -> View:
    return _plain_view(
        "v_verdicts", schema.VERDICTS, "One row a verdict of a run.",
        {"code": ("", "which"), "severity": ("", "fail, warn or info"), "evidence": ("", "with the numbers")},
    )  # fmt: skip


def _labels() -> View:
    return _plain_view(
        "v_labels", schema.LABELS, "One row a label of a run.",
        {"key": ("", "name"), "value": ("", "value"), "source": ("", "plan, file name, run.json or user")},
    )  # fmt: skip


def _gates() -> View:
    return _plain_view(
        "v_gates", schema.GATES, "One row a condition before a cell.",
        {
            "at": ("", _AT.doc), "gate": ("", "which"), "asked": ("", "the condition as written"),
            "bound": ("", "its bound"), "last": ("", "last reading"), "unit": ("", "of both"),
            "state": ("", "held, waited, gave_up, unreadable or not_asked"), "waited_s": ("s", "until it held"),
            "policy": ("", "skip, run-flagged or abort"), "readings": ("", "what was seen, JSON"),
        },
    )  # fmt: skip


def _notes() -> View:
    return _plain_view(
        "v_notes", schema.NOTES, "One row a note, watchdog report or launch.",
        {
            "at": ("", _AT.doc), "boot_ns": ("ns", _BOOT.doc), "source": ("", "agent or host"), "code": ("", "which"),
            "text": ("", "for people"), "facts": ("", "with it, JSON"),
        },
    )  # fmt: skip


def _reports() -> View:
    return _plain_view(
        "v_report", schema.REPORT_LINES, "One row a line of the perf block.",
        {
            "at": ("", _AT.doc), "turn": ("", "of the session"), "name": ("", "before the colon"),
            "facts": ("", "every number, JSON"), "text": ("", "the line"),
        },
    )  # fmt: skip


def _artifacts() -> View:
    return _plain_view(
        "v_artifacts", schema.ARTIFACTS, "One row a file of a run.",
        {
            "name": ("", "file name"), "kind": ("", "metrics, route, compute, compute_layers, io ..."),
            "size": ("bytes", ""), "sha256": ("", "where it lies in the artifact store"),
            "state": ("", "stored, awaited, given_up or removed"), "problem": ("", "why it is not here"),
        },
    )  # fmt: skip


def _devices() -> View:
    columns = (
        _C("agent_uuid", "str", "", "32 hex digits"), _C("name", "str", "", "what people call it"),
        _C("model", "str", "", "the phone's model"), _C("facts", "str", "", "what its agent last told, JSON"),
        _C("first_seen_wall_ns", "int", "ns", ""), _C("last_seen_wall_ns", "int", "ns", ""),
    )  # fmt: skip
    sql = (
        "SELECT d.agent_uuid, n.name, d.model, CAST(d.facts AS TEXT) AS facts, d.first_seen_wall_ns, d.last_seen_wall_ns"
        " FROM devices d LEFT JOIN device_names n ON n.agent_uuid = d.agent_uuid"
    )
    return View("v_devices", "One row a phone.", columns, _same(sql))
