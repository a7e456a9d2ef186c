"""Rows waiting to be written: one buffer a table, one bulk write each.

In: rows as the parsers make them. Out: rows in the database, in the transaction of whoever calls `flush`. Values that
their column cannot hold (a float where the contract says int, a number beyond 64 bits, a list) go into the row's
`extra` JSON under their own name, so that a strange file never stops the rest and nothing is dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Table

from bmoe_collector.store import names
from bmoe_collector.store import schema as tables
from bmoe_collector.store.bulk import Copy, bulk
from bmoe_collector.store.engine import to_json, view

LIMIT = 1 << 63
_NONE = type(None)
_FITS: dict[str, tuple[type, ...]] = {
    "int": (int, _NONE),
    "float": (float, int, _NONE),
    "str": (str, _NONE),
    "bool": (bool, _NONE),
}


class Shape:
    """How a mapping of the contract's names becomes the middle of a row: ordered columns, the rest apart."""

    def __init__(self, columns: Mapping[str, str], ignore: Sequence[str] = ()) -> None:
        self.columns = tuple(columns)
        self._all = itemgetter(*columns)
        self._kinds = columns
        self._known = frozenset(columns) | frozenset(ignore)
        # Types of a whole row to what takes its ints, whose size must be looked at; rows repeat their types.
        self._signatures: dict[tuple[type, ...], Callable[[list[Any]], tuple[int, ...]]] = {}

    def split(self, values: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any] | None]:
        """The row's values in column order, and what has no column of its own (None when nothing)."""
        get = values.get
        row: list[Any] = [get(name) for name in self.columns]
        signature = tuple(map(type, row))
        ints = self._signatures.get(signature) or self._learn(signature)
        extra: dict[str, Any] | None = None
        if ints is None or ((numbers := ints(row)) and (max(numbers) >= LIMIT or min(numbers) < -LIMIT)):
            extra = self._misfits(row)
        if not self._known.issuperset(values):
            extra = (extra or {}) | {key: value for key, value in values.items() if key not in self._known}
        return row, extra

    def checked(self, values: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any] | None]:
        """As `split`, for values that the contract's parser has checked by the same table: nothing is looked at again."""
        if len(values) == len(self.columns):
            # Most lines have just the columns: nothing to look for, and nothing left over.
            try:
                return self._all(values), None
            except KeyError:
                pass
        return self.split(values)

    def _learn(self, signature: tuple[type, ...]) -> Callable[[list[Any]], tuple[int, ...]] | None:
        for kind, found in zip(self._kinds.values(), signature, strict=True):
            if found not in _FITS[kind] and not (found is bool and kind == "int"):
                return None
        places = [place for place, found in enumerate(signature) if found is int]
        if len(places) > 1:
            self._signatures[signature] = itemgetter(*places)
        else:
            self._signatures[signature] = lambda row: tuple(row[place] for place in places)
        return self._signatures[signature]

    def _misfits(self, row: list[Any]) -> dict[str, Any]:
        """Take out of the row what its columns cannot hold."""
        extra: dict[str, Any] = {}
        for place, (name, kind) in enumerate(self._kinds.items()):
            value = row[place]
            if isinstance(value, float) and kind == "int" and value.is_integer() and abs(value) < LIMIT:
                row[place] = int(value)
            elif isinstance(value, (int, float)) and kind == "str":
                row[place] = str(value)
            elif value is not None and (
                not isinstance(value, _FITS[kind]) or (isinstance(value, int) and not -LIMIT <= value < LIMIT)
            ):
                extra[name] = value
                row[place] = None
        return extra


PROGRESS = Shape(names.PROGRESS_COLUMNS)
SUMMARY = Shape(names.SUMMARY_COLUMNS, ("id", "cancelled", "tokens"))
PREAMBLE = Shape(names.PREAMBLE_COLUMNS)
SAMPLE = Shape(names.SAMPLE_COLUMNS)

_HEAD = ("run_no", "at")
COLUMNS: dict[str, tuple[str, ...]] = {
    "tokens_stdout": (
        *_HEAD,
        "turn",
        *PROGRESS.columns,
        *("load_mb", "load_ms", "reset", "delta_reasoning", "delta_text", "line", "boot_ns", "uncertainty_ns", "extra"),
    ),
    "tokens_csv": (*_HEAD, *names.CSV_COLUMNS, "extra"),
    "turns": (
        *_HEAD,
        *("turn", "request_id", "kind", "state", "tokens", "cancelled", "text", "text_view", "reasoning", "request"),
        *("decide", "error", "begin_boot_ns", "end_boot_ns"),
        *SUMMARY.columns,
        "extra",
    ),
    "trailers": (*_HEAD, "turn", "keys"),
    "report_lines": (*_HEAD, "turn", "name", "facts", "text"),
    "other_lines": (*_HEAD, "stream", "line", "turn", "text"),
    "samples": (
        *_HEAD,
        *("boot_ns", "source", "kind", "took_ms", "segment", "seq"),
        *SAMPLE.columns,
        *("values", "refused"),
    ),
    "residency": (
        *_HEAD,
        *("boot_ns", "part", "method", "problem", "bytes", "pages", "pages_looked_at", "pages_resident", "fraction"),
        *("standard_error", "cost_ms", "cpu_ms"),
    ),
    "gates": (
        *_HEAD,
        *("boot_ns", "gate", "asked", "bound", "last", "unit", "state", "waited_s", "policy", "source", "readings"),
    ),
    "notes": (*_HEAD, "boot_ns", "source", "code", "text", "facts"),
    "gaps": (*_HEAD, "boot_ns", "what", "frames", "bytes", "why", "lost_segment", "declared"),
    "unknown_frames": (*_HEAD, "segment", "seq", "boot_ns", "data"),
}
FLOWING = "tokens_stdout"
WORTH_SENDING = 100
"""Rows that are sent on before a batch is parsed to its end: for fewer there is nothing to be done meanwhile."""
TABLES: dict[str, Table] = {table.name: table for table in tables.DERIVED}


def json_or_none(value: Any) -> str | None:
    """JSON text for a JSON column; NULL for nothing."""
    return None if value is None else to_json(value)


class Sink:
    """Buffers for one run. `at` goes on where it was, also when rows are made again without being written."""

    def __init__(self, run_no: int) -> None:
        self.run_no = run_no
        self.next: dict[str, int] = dict.fromkeys(COLUMNS, 0)
        self.rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in COLUMNS}

    def add(self, table: str, *values: Any) -> None:
        """Append a row; `run_no` and `at` are put before the values."""
        at = self.next[table]
        self.next[table] = at + 1
        self.rows[table].append((self.run_no, at, *values))

    def take(self, table: str) -> tuple[list[tuple[Any, ...]], int]:
        """A table's buffer and the next place in it, for loops that append themselves and then `give` the place."""
        return self.rows[table], self.next[table]

    def give(self, table: str, place: int) -> None:
        """The place after what was appended."""
        self.next[table] = place

    def turn(
        self,
        *,
        turn: int | None,
        request_id: int | None,
        kind: str,
        state: str,
        tokens: int | None,
        cancelled: bool = False,
        text: bytes = b"",
        reasoning: bytes = b"",
        request: Any = None,
        decide: Any = None,
        error: Any = None,
        begin_boot_ns: int | None = None,
        end_boot_ns: int | None = None,
        summary: Mapping[str, Any] | None = None,
    ) -> None:
        """Append a generation, decision or rejected request."""
        row, extra = SUMMARY.split(summary or {})
        self.add(
            "turns",
            turn,
            _fit(request_id),
            kind,
            state,
            _fit(tokens),
            cancelled,
            text,
            view(text),
            reasoning,
            json_or_none(request),
            json_or_none(decide),
            json_or_none(error),
            begin_boot_ns,
            end_boot_ns,
            *row,
            json_or_none(extra),
        )

    def waiting(self) -> int:
        """How many rows wait."""
        return sum(map(len, self.rows.values()))

    def forget(self) -> None:
        """Drop what waits: rows that are in the database already."""
        for rows in self.rows.values():
            rows.clear()

    @contextlib.contextmanager
    def flowing(self, connection: Connection) -> Iterator[Callable[[], None]]:
        """While a batch is parsed: what this gives, called now and then, sends tokens on to a server that writes them meanwhile.

        Nothing else may be asked of the connection inside. In SQLite, which has no other process to do it, it does nothing.
        """
        if connection.dialect.name == "sqlite":
            yield lambda: None
            return
        rows = self.rows[FLOWING]
        with Copy(connection, TABLES[FLOWING], COLUMNS[FLOWING]) as copy:

            def send() -> None:
                if copy.begun or len(rows) >= WORTH_SENDING:
                    copy.send(rows)
                    rows.clear()

            yield send

    def flush(self, connection: Connection) -> None:
        """Write what waits."""
        for name, rows in self.rows.items():
            if rows:
                bulk(connection, TABLES[name], COLUMNS[name], rows)
                rows.clear()


def _fit(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < LIMIT else None
