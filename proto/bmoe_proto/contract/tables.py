"""Numbers in rows of comma-separated text: lines in, equally long columns out. Shared by the metrics CSV and the traces.

A row is split by position and named by the file's own header; nothing is known by how many columns there are. Rows with
another number of cells are told as problems and left out; a cell that is no number where one is promised is None and told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bmoe_proto.contract.columns import Table

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
    # One split of everything is several times faster than a split for every row.
    if all(row.count(",") == width - 1 for row in rows):
        cells = ",".join(rows).split(",") if rows else []
        split: list[Sequence[str]] = [cells[at::width] for at in range(width)]
        taken = list(numbers)
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
                return _finite(values)
        return [text or None for text in texts]
    if known.type == "str":
        return list(texts)
    kind = int if known.type == "int" else float
    values = _all(kind, texts)
    if values is None:
        values = [_one(kind, text, name, number, problems) for text, number in zip(texts, numbers, strict=True)]
    if known.minus_one and -1 in values:
        values = [None if value == -1 else value for value in values]
    return _finite(values) if kind is float else values


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
    return [
        value if isinstance(value, int) or (value is not None and math.isfinite(value)) else None for value in values
    ]


def _one(kind: Callable[[str], Any], text: str, name: str, number: int, problems: Problems) -> Any:
    try:
        return kind(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        if text.strip():
            problems.tell(number, f"{name} is no number: {text[:40]!r}")
        return None
    if not math.isfinite(value):
        return None
    if value == int(value):
        return int(value)
    problems.tell(number, f"{name} is no whole number: {text[:40]!r}")
    return None
