"""Finished files of a run to rows: the metrics CSV, and the summaries that CSV, stdout and report tell together.

In: a file's bytes. Out: rows in a `Sink`, columns of `configs`; and `merge_turns`, which gives every turn its summary
after all sources are in: BMOE_DONE stands, the CSV's trailer fills what it has not, the report what neither has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count, repeat
from typing import Any

from bmoe_proto.contract.metrics import MetricsFile
from sqlalchemy import BindParameter, Connection, bindparam, func, insert, select, update

from bmoe_collector.ingest.sink import LIMIT, PREAMBLE, SUMMARY, Sink
from bmoe_collector.store import names
from bmoe_collector.store.engine import plain, to_json
from bmoe_collector.store.schema import CONFIGS, REPORT_LINES, TOKENS_CSV, TOKENS_STDOUT, TRAILERS, TURNS

# Statements of every run's end are made once: making one costs more than running it.
_RUN: BindParameter[int] = bindparam("of_run")
_TURNS = select(TURNS).where(TURNS.c.run_no == _RUN).order_by(TURNS.c.at)
_COUNTED = select(TURNS.c.kind, TURNS.c.state, TURNS.c.tokens).where(TURNS.c.run_no == _RUN)
_CSV_BY_TURN, _STDOUT_BY_TURN = (
    select(table.c.turn, func.count()).where(table.c.run_no == _RUN).group_by(table.c.turn)
    for table in (TOKENS_CSV, TOKENS_STDOUT)
)
_TRAILERS = select(TRAILERS.c.turn, TRAILERS.c["keys"]).where(TRAILERS.c.run_no == _RUN).order_by(TRAILERS.c.at)
_REPORT = select(REPORT_LINES.c.facts).where(REPORT_LINES.c.run_no == _RUN).order_by(REPORT_LINES.c.at)
_CHANGE_TURN = update(TURNS).where(TURNS.c.run_no == _RUN, TURNS.c.at == bindparam("of_at"))

_KINDS: dict[str, set[type]] = {"int": {int, type(None)}, "float": {float, int, type(None)}, "str": {str, type(None)}}


def metrics_rows(sink: Sink, file: MetricsFile) -> None:
    """Rows of a metrics CSV and its trailers."""
    size = len(file)
    extras: list[dict[str, Any]] | None = None
    columns: list[Sequence[Any]] = []
    for name, kind in names.CSV_COLUMNS.items():
        column = file.turns if name == "turn" else file.columns.get(name)
        if column is None:
            columns.append([None] * size)
            continue
        if not _fits(column, kind):
            extras = extras or [{} for _ in range(size)]
            column = [_fit(value, kind, name, extra) for value, extra in zip(column, extras, strict=True)]
        columns.append(column)
    for name in file.unknown:
        extras = extras or [{} for _ in range(size)]
        for value, extra in zip(file.columns[name], extras, strict=True):
            if value is not None:
                extra[name] = value
    texts = repeat(None, size) if extras is None else [to_json(extra) if extra else None for extra in extras]
    first = sink.next["tokens_csv"]
    rows = zip(repeat(sink.run_no, size), count(first), *columns, texts, strict=False)
    sink.rows["tokens_csv"].extend(rows)
    sink.next["tokens_csv"] = first + size
    for trailer in file.trailers:
        sink.add("trailers", trailer.turn, to_json(dict(trailer.values)))


def _fits(column: Sequence[Any], kind: str) -> bool:
    found = set(map(type, column))
    if not found <= _KINDS[kind]:
        return False
    if int in found:
        whole = [value for value in column if type(value) is int]
        return max(whole) < LIMIT and min(whole) >= -LIMIT
    return True


def _fit(value: Any, kind: str, name: str, extra: dict[str, Any]) -> Any:
    """The value if its column can hold it; else None, and the value goes to `extra`."""
    if type(value) in _KINDS[kind] and not (isinstance(value, int) and not -LIMIT <= value < LIMIT):
        return value
    if isinstance(value, float) and kind == "int" and value.is_integer() and abs(value) < LIMIT:
        return int(value)
    extra[name] = value
    return None


def config_row(run_no: int, file: MetricsFile) -> dict[str, Any] | None:
    """A row of `configs`; None for a file without a preamble."""
    if not file.preamble and not file.version:
        return None
    row, _ = PREAMBLE.split(file.preamble)
    return {
        "run_no": run_no,
        "format": f"bmoe_metrics v{file.version}" if file.version else None,
        "keys": plain(dict(file.preamble)),
        **dict(zip(PREAMBLE.columns, row, strict=True)),
    }


def put_config(connection: Connection, row: Mapping[str, Any] | None) -> None:
    """Write the configuration of a run that has none yet."""
    if row is None:
        return
    if connection.execute(select(CONFIGS.c.run_no).where(CONFIGS.c.run_no == row["run_no"])).first() is None:
        connection.execute(insert(CONFIGS).values(**row))


def merge_turns(connection: Connection, run_no: int) -> dict[str, int]:
    """Give every turn its summary from all sources; returns `n_tokens` and `n_turns` as the rows show them."""
    run = {"of_run": run_no}
    turns = list(connection.execute(_TURNS, run).mappings())
    trailers = _trailers(connection, run_no)
    rows = {int(turn or 0): int(n) for turn, n in connection.execute(_CSV_BY_TURN, run)}
    known = {row["turn"] for row in turns if row["turn"] is not None}
    report = _report(connection, run_no)
    for row in turns:
        if row["turn"] is None:
            continue
        found = dict(trailers.get(row["turn"], {}))
        if row["kind"] == "oneshot":
            found = {**report, **found}
            _write(connection, run_no, row["at"], found, {})
        else:
            mine = {name: row[name] for name in SUMMARY.columns if row[name] is not None}
            _write(connection, run_no, row["at"], {**found, **mine, **(row["extra"] or {})}, mine)
    at = max((row["at"] for row in turns), default=-1) + 1
    for turn in sorted((set(rows) | set(trailers)) - known):
        found = trailers.get(turn, {})
        told = found.get("tokens")
        summary, extra = SUMMARY.split(found)
        connection.execute(
            insert(TURNS).values(
                run_no=run_no,
                at=at,
                turn=turn,
                kind="generate" if len(set(rows) | set(trailers) | known) > 1 else "oneshot",
                state="done" if found else "began",
                tokens=told if isinstance(told, int) else rows.get(turn, 0),
                cancelled=False,
                text=b"",
                text_view="",
                reasoning=b"",
                extra=plain(extra),
                **dict(zip(SUMMARY.columns, summary, strict=True)),
            )
        )
        at += 1
    counted = connection.execute(_COUNTED, run).all()
    real = [row for row in counted if row.kind != "rejected" and row.state not in ("not_run", "sent")]
    told_tokens = sum(row.tokens or 0 for row in counted)
    return {"n_tokens": _tokens(connection, run_no, rows) or told_tokens, "n_turns": len(real)}


def _tokens(connection: Connection, run_no: int, csv: Mapping[int, int]) -> int:
    """Tokens that have a row in either source: both count from 1 in every turn, so the longer one has them all."""
    stdout = {int(turn or 0): int(n) for turn, n in connection.execute(_STDOUT_BY_TURN, {"of_run": run_no})}
    return sum(max(csv.get(turn, 0), stdout.get(turn, 0)) for turn in csv.keys() | stdout.keys())


def _write(connection: Connection, run_no: int, at: int, found: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    summary, extra = SUMMARY.split(found)
    values = dict(zip(SUMMARY.columns, summary, strict=True))
    values = {name: value for name, value in values.items() if value is not None and name not in mine}
    if extra:
        values["extra"] = plain(extra)
    if not values:
        return
    connection.execute(_CHANGE_TURN, {**values, "of_run": run_no, "of_at": at})


def _trailers(connection: Connection, run_no: int) -> dict[int, dict[str, Any]]:
    """Trailers by turn, keys in the spelling of BMOE_DONE."""
    from bmoe_proto.contract.columns import done_spelling

    found: dict[int, dict[str, Any]] = {}
    for turn, keys in connection.execute(_TRAILERS, {"of_run": run_no}):
        found.setdefault(int(turn), {done_spelling(key): value for key, value in keys.items()})
    return found


def _report(connection: Connection, run_no: int) -> dict[str, Any]:
    """Numbers of the report that BMOE_DONE has a name for; the line that names one first stands."""
    wanted = set(SUMMARY.columns)
    found: dict[str, Any] = {}
    for (facts,) in connection.execute(_REPORT, {"of_run": run_no}):
        for key, value in facts.items():
            if key in wanted and value is not None:
                found.setdefault(key, value)
    return found
