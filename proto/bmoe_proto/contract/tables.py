"""Numbers in rows of comma-separated text: lines in, equally long columns out. Shared by the metrics CSV and the traces.

A row is split by position and named by the file's own header; nothing is known by how many columns there are. Rows with
another number of cells are told as problems and left out; a cell that is no number where one is promised is None and told.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bmoe_proto.contract.columns import Table

_INT64 = 1 << 63
_PLAIN = b"0123456789.,-"

MOST_PROBLEMS = 100
"""How many problems of one file are listed; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What could not be understood, and where: `line` is 1-based."""

    line: int
    what: str


class Problems(list[Problem]):
    """Problems of one file; a file of nonsense does not make a list as long as itself."""

    def __init__(self, found: Iterable[Problem] = ()) -> None:
        super().__init__(found)
        self.more = 0

    def tell(self, line: int, what: str) -> None:
        """Note one, or count it when there are many already."""
        if len(self) < MOST_PROBLEMS:
            self.append(Problem(line, what))
        else:
            self.more += 1


def columns_of(
    rows: Sequence[str],
    numbers: Sequence[int],
    names: Sequence[str],
    table: Table,
    problems: Problems,
    wide: str = "",
) -> tuple[dict[str, list[Any]], list[int]]:
    """Columns of rows (without line ends), and the line numbers of the rows that were taken.

    `numbers`: line number of every row. `wide`: a text column that may hold commas itself.
    """
    width = len(names)
    if not rows:
        return {name: [] for name in names}, []
    split: list[Sequence[str]]
    if all(row.count(",") == width - 1 for row in rows):
        # One pass over everything is several times faster than one for every row, and JSON's number reader is twice as
        # fast as splitting and converting. It knows neither nan nor an empty cell, which go the longer way.
        taken = list(numbers)
        joined = ",".join(rows)
        plain = _plain_numbers(joined)
        if plain is not None:
            return {
                name: _settle(name, plain[at::width], taken, table, problems) for at, name in enumerate(names)
            }, taken
        cells = joined.split(",")
        split = [cells[at::width] for at in range(width)]
    else:
        kept, taken = _kept(rows, numbers, names, problems, wide)
        split = [list(column) for column in zip(*kept, strict=True)] if kept else [[] for _ in names]
    out: dict[str, list[Any]] = {}
    for name, texts in zip(names, split, strict=True):
        out[name] = column(name, texts, taken, table, problems)
    return out, taken


def _kept(
    rows: Sequence[str], numbers: Sequence[int], names: Sequence[str], problems: Problems, wide: str
) -> tuple[list[list[str]], list[int]]:
    width = len(names)
    kept: list[list[str]] = []
    taken: list[int] = []
    at = names.index(wide) if wide in names else -1
    for row, number in zip(rows, numbers, strict=True):
        cells = row.split(",")
        if len(cells) > width and at >= 0:
            behind = width - at - 1
            cells = [*cells[:at], ",".join(cells[at : len(cells) - behind]), *cells[len(cells) - behind :]]
        if len(cells) != width:
            problems.tell(number, f"row with {len(cells)} cells where the header names {width}: {row[:80]!r}")
            continue
        kept.append(cells)
        taken.append(number)
    return kept, taken


def column(name: str, texts: Sequence[str], numbers: Sequence[int], table: Table, problems: Problems) -> list[Any]:
    """One column's texts as values: by the table, or for an unknown column numbers when all are numbers."""
    known = table.get(name)
    if known is None:
        for kind in (int, float):
            values = _all(kind, texts)
            if values is not None:
                return _settle(name, values, numbers, table, problems)
        return [text or None for text in texts]
    if known.type == "str":
        return list(texts)
    values = _all(int if known.type == "int" else float, texts)
    if values is None:
        values = [_one(text, name, number, problems) for text, number in zip(texts, numbers, strict=True)]
    return _settle(name, values, numbers, table, problems)


def _plain_numbers(joined: str) -> list[Any] | None:
    if not joined.isascii() or joined.encode().translate(None, _PLAIN):
        return None
    try:
        found = json.loads(f"[{joined}]")
    except ValueError:
        return None
    return found if isinstance(found, list) else None


def _settle(name: str, values: list[Any], numbers: Sequence[int], table: Table, problems: Problems) -> list[Any]:
    """Numbers as their column promises them: whole or not, unmeasured and not finite as None."""
    known = table.get(name)
    kinds = set(map(type, values))
    if known is None or known.type != "int":
        if int in kinds and (known is not None or float in kinds):
            values = [float(value) if value is not None else None for value in values]
        values = _finite(values)
        if known is not None and known.minus_one and -1 in values:
            values = [None if value == -1 else value for value in values]
        return values
    if float in kinds or not _fits(values):
        return [_whole(value, name, number, problems) for value, number in zip(values, numbers, strict=True)]
    return values


def _fits(values: list[Any]) -> bool:
    """Whether whole numbers all fit 64 bits; a column with gaps is looked at one by one."""
    try:
        return not values or (max(values) < _INT64 and min(values) >= -_INT64)
    except TypeError:
        return False


def _whole(value: float | None, name: str, number: int, problems: Problems) -> int | None:
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and -_INT64 <= value < _INT64:
        return int(value)
    problems.tell(number, f"{name} is no whole number of 64 bits: {value!r:.40}")
    return None


def _all(kind: Callable[[str], Any], texts: Sequence[str]) -> list[Any] | None:
    try:
        return list(map(kind, texts))
    except ValueError:
        return None


def _finite(values: list[Any]) -> list[Any]:
    # The sum of finite numbers this small is finite, so one pass in C tells whether a second one is needed.
    try:
        if math.isfinite(sum(values)):
            return values
    except (TypeError, OverflowError):
        pass
    return [value if value is None or isinstance(value, int) or math.isfinite(value) else None for value in values]


def _one(text: str, name: str, number: int, problems: Problems) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if text.strip():
        problems.tell(number, f"{name} is no number: {text[:40]!r}")
    return None
