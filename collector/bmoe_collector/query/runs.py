"""Lists of runs: filters that read like the domain in, a page of rows out. One query, and one each for labels and verdicts.

In: a store, a `Selection` and names of columns (query/fields.py). Out: a `Page` whose rows are plain values: numbers,
text, booleans, None for unmeasured, a list of codes for `verdicts`, a dict for `labels`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, or_, select

from bmoe_collector.common import UserError
from bmoe_collector.query.fields import (
    Afterwards,
    Falling,
    canonical,
    compile_where,
    contains,
    device,
    expression,
    fields,
    ordering,
    source,
)
from bmoe_collector.query.where import parse
from bmoe_collector.store.engine import Store
from bmoe_collector.store.schema import DEVICE_TAGS, LABELS, RUNS, VERDICTS

OUTCOMES = ("started", "ok", "partial", "failed", "killed", "aborted", "skipped", "lost")
USUAL = ("run_id", "started", "device", "model_name", "cell", "labels", "outcome", "tok_s", "cache_hit_pct", "ttft_s",
         "verdicts")  # fmt: skip
"""Columns of a list when none are named."""

_CHUNK = 500  # values of one IN: SQLite's older limit is 999
_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*(m|min|h|d|w)")
_UNIT = {"m": "minutes", "min": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@dataclass(frozen=True, slots=True)
class Selection:
    """Which runs; every filter that is given must hold. Text filters look for a part, ASCII letters in any case."""

    model: str | None = None
    device: str | None = None  # a name, a model, a tag, or the start of an agent's uuid
    engine: str | None = None  # version or configured name, or the start of the binary's sha256
    plan: str | None = None  # a name, or the start of an id
    cell: str | None = None  # the whole name
    outcomes: Sequence[str] = ()
    since: str | None = None
    until: str | None = None
    where: str | None = None
    labels: Sequence[str] = ()  # KEY=VALUE, or KEY: has that label
    verdicts: Sequence[str] = ()  # has every one of them
    without: Sequence[str] = ()  # has none of them
    run_ids: Sequence[str] | None = None
    sort: Sequence[str] = ()  # names; a minus in front: largest first
    limit: int = 0  # 0: all


EVERYTHING = Selection()


@dataclass(frozen=True, slots=True)
class Page:
    """Rows of a list; `more` when the limit cut it."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    more: bool = False

    def dicts(self) -> list[dict[str, Any]]:
        """One dict a row, by column name."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def list_runs(store: Store, selection: Selection = EVERYTHING, columns: Sequence[str] = USUAL) -> Page:
    """The runs of a selection, newest first unless it says otherwise.

    Raises:
        UserError: a name nobody knows, or a filter that cannot be read.
    """
    names = tuple(dict.fromkeys(canonical(name) for name in columns))
    if not names:
        raise UserError("a list needs at least one column; `bmoe runs --fields` lists them")
    query = _selected(names).where(*conditions(selection)).order_by(*_order(tuple(selection.sort)))
    if selection.limit:
        query = query.limit(selection.limit + 1)
    with store.read() as connection:
        rows: list[Any] = list(connection.execute(query).all())
        more = bool(selection.limit) and len(rows) > selection.limit
        rows = rows[: selection.limit] if more else rows
        numbers = [row[0] for row in rows]
        whole = selection.limit == 0
        many = {name: _many(connection, name, numbers, whole=whole) for name in names if name in {"labels", "verdicts"}}
    return Page(names, _plain_rows(names, rows, many), more)


# Putting a statement together takes longer than answering it from an index: what can be known beforehand is kept.
@lru_cache(maxsize=64)
def _selected(names: tuple[str, ...]) -> Select[Any]:
    return select(RUNS.c.run_no, *(_column(name) for name in names)).select_from(source())


def _column(name: str) -> ColumnElement[Any]:
    """What is selected for a name; labels and verdicts are looked up afterwards."""
    if name == "started":
        return RUNS.c.started_wall_ns.label("started")
    if name in {"labels", "verdicts", "verdict"}:
        return RUNS.c.run_no.label(name)
    return expression(name)


def _plain_rows(
    names: Sequence[str], rows: Sequence[Sequence[Any]], many: dict[str, dict[int, Any]]
) -> list[tuple[Any, ...]]:
    """Values as both databases should have given them, column by column."""
    if not rows:
        return []
    numbers, *columns = zip(*rows, strict=True)
    made: list[Sequence[Any]] = []
    for name, values in zip(names, columns, strict=True):
        kind = fields()[name].kind if name in fields() else ""
        if name == "labels":
            made.append([many[name].get(number, {}) for number in numbers])
        elif name == "verdicts":
            made.append([many[name].get(number, []) for number in numbers])
        elif name == "started":
            made.append([utc(value) for value in values])
        elif kind in {"bool", "int"}:
            to = bool if kind == "bool" else int
            made.append([None if value is None else to(value) for value in values])
        else:
            made.append(values)
    return list(zip(*made, strict=True))


def utc(wall_ns: int | None) -> str | None:
    """A wall clock's time in UTC, to the second."""
    if wall_ns is None:
        return None
    return datetime.fromtimestamp(wall_ns // 10**9, UTC).isoformat().replace("+00:00", "Z")


_MANY = {
    "labels": ("SELECT run_no, key, value FROM labels", ""),
    "verdicts": ("SELECT run_no, code FROM verdicts", " ORDER BY run_no, at"),
}


def driver_rows(connection: Connection, query: str, numbers: Sequence[int] = ()) -> list[Any]:
    """Rows straight from the driver, plain tuples; `{}` in the query is where the numbers' placeholders go."""
    driver: Any = connection.connection.driver_connection
    marks = ", ".join(["?" if connection.dialect.name == "sqlite" else "%s"] * len(numbers))
    with closing(driver.cursor()) as cursor:
        cursor.execute(query.replace("{}", marks), list(numbers))
        return list(cursor.fetchall())


def _many(connection: Connection, name: str, numbers: list[int], *, whole: bool) -> dict[int, Any]:
    """Labels (dict) or verdict codes (list) of runs, by their number."""
    found: dict[int, Any] = {}
    query, order = _MANY[name]
    # A list of everything reads the table once; a page asks for its own runs.
    if whole and len(numbers) > _CHUNK:
        rows: Iterable[Any] = driver_rows(connection, query + order)
    else:
        some_query = f"{query} WHERE run_no IN ({{}}){order}"
        rows = (row for some in chunks(numbers) for row in driver_rows(connection, some_query, some))
    if name == "labels":
        for run_no, key, value in rows:
            found.setdefault(run_no, {})[key] = value
        return {number: dict(sorted(found[number].items())) for number in numbers if number in found}
    for run_no, code in rows:
        codes = found.setdefault(run_no, [])
        if code not in codes:
            codes.append(code)
    return found


def chunks(values: Sequence[Any], size: int = _CHUNK) -> Iterable[Sequence[Any]]:
    """Pieces of at most `size`."""
    return [values[at : at + size] for at in range(0, len(values), size)]


@lru_cache(maxsize=64)
def _order(sort: tuple[str, ...]) -> list[ColumnElement[Any]]:
    found: list[ColumnElement[Any]] = []
    for name in sort:
        downwards = name.startswith("-")
        column = ordering(name.lstrip("-+"))
        found.append(Falling(column) if downwards else column.asc().nulls_last())
    if not sort:
        found.append(Falling(RUNS.c.started_wall_ns))
    found.append(RUNS.c.run_no.desc())
    return found


def conditions(selection: Selection, now: datetime | None = None) -> list[ColumnElement[bool]]:
    """The filters as SQL over `source()`."""
    found: list[ColumnElement[bool]] = []
    if selection.model:
        found.append(contains(RUNS.c.model_name, selection.model))
    if selection.device:
        found.append(_device(selection.device))
    if selection.engine:
        parts = [contains(RUNS.c.engine_version, selection.engine), contains(RUNS.c.engine_name, selection.engine)]
        found.append(or_(*parts, *_starts(RUNS.c.engine_sha256, selection.engine)))
    if selection.plan:
        found.append(or_(contains(RUNS.c.plan_name, selection.plan), *_starts(RUNS.c.plan_id, selection.plan)))
    if selection.cell:
        found.append(RUNS.c.cell == selection.cell)
    if selection.outcomes:
        found.append(RUNS.c.outcome.in_([_outcome(word) for word in selection.outcomes]))
    if selection.since:
        found.append(RUNS.c.started_wall_ns >= moment(selection.since, now, "--since"))
    if selection.until:
        found.append(RUNS.c.started_wall_ns < moment(selection.until, now, "--until"))
    found += [_label(text) for text in selection.labels]
    found += [_verdict(code) for code in selection.verdicts]
    found += [~_verdict(code) for code in selection.without]
    if selection.where is not None:
        tree = _where(selection.where)
        found.append(Afterwards(tree) if selection.limit else tree)
    if selection.run_ids is not None:
        found.append(or_(*(RUNS.c.run_id.in_(some) for some in chunks(list(selection.run_ids) or [""]))))
    return found


@lru_cache(maxsize=64)
def _where(text: str) -> ColumnElement[bool]:
    return compile_where(parse(text))


def _device(text: str) -> ColumnElement[bool]:
    tagged = select(DEVICE_TAGS.c.tag).where(DEVICE_TAGS.c.agent_uuid == RUNS.c.agent_uuid, DEVICE_TAGS.c.tag == text)
    parts = [contains(device(), text), contains(RUNS.c.device_model, text), tagged.exists()]
    return or_(*parts, *_starts(RUNS.c.agent_uuid, text))


def _starts(column: ColumnElement[Any], text: str) -> list[ColumnElement[bool]]:
    """The column begins with these hex digits, when they are that and at least four."""
    start = text.lower()
    if not re.fullmatch(r"[0-9a-f]{4,64}", start):
        return []
    return [and_(column >= start, column < start + "g")]


def _outcome(word: str) -> str:
    if word not in OUTCOMES:
        raise UserError(f"no outcome is called {word!r}: they are {', '.join(OUTCOMES)}")
    return word


def _label(text: str) -> ColumnElement[bool]:
    key, equals, value = text.partition("=")
    if not key:
        raise UserError(f"--label {text}: say KEY=VALUE, or KEY for runs that have that label at all")
    found = select(LABELS.c.run_no).where(LABELS.c.run_no == RUNS.c.run_no, LABELS.c.key == key)
    return (found.where(LABELS.c.value == value) if equals else found).exists()


def _verdict(code: str) -> ColumnElement[bool]:
    from bmoe_collector.verdicts import CODES

    if code not in CODES:
        raise UserError(f"no verdict is called {code!r}: they are {', '.join(CODES)}")
    return select(VERDICTS.c.run_no).where(VERDICTS.c.run_no == RUNS.c.run_no, VERDICTS.c.code == code).exists()


def moment(text: str, now: datetime | None = None, option: str = "--since") -> int:
    """A time as nanoseconds since 1970: `2d`, `3h`, `45m`, `2w` before now, or an ISO date or time, local without zone.

    Raises:
        UserError: it is neither.
    """
    wanted = text.strip()
    ago = _AGO.fullmatch(wanted.lower())
    try:
        if ago:
            at = (now or datetime.now(UTC)) - timedelta(**{_UNIT[ago[2]]: float(ago[1])})
        else:
            at = datetime.fromisoformat(wanted)
            at = at.astimezone() if at.tzinfo is None else at
        return int(at.timestamp()) * 10**9
    except (ValueError, OverflowError, OSError):
        raise UserError(
            f"{option} {text}: say how long ago (45m, 3h, 2d, 2w) or a date: 2026-05-01, 2026-05-01T12:30"
        ) from None
