"""Rows as text that is safe wherever it lands: CSV for spreadsheets, Markdown, tables for the terminal.

In: column names and rows of plain values. Out: text. A cell of CSV that a spreadsheet would run as a formula gets an
apostrophe in front; control characters are written out everywhere, so no name of a model or phone can act.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from bmoe_collector.common import plain
from bmoe_collector.show.safe import escape

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "＝", "＋", "－", "＠")


def cell_text(value: Any) -> str:
    """A value as text: nothing for None, lists joined, dicts as KEY=VALUE, numbers unrounded."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, dict):
        return " ".join(f"{key}={item}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def csv_cell(value: Any) -> Any:
    """A cell for CSV: numbers as they are, text harmless."""
    if value is None or isinstance(value, int | float):
        return int(value) if isinstance(value, bool) else value
    shown = escape(cell_text(value))
    return "'" + shown if shown.startswith(_FORMULA) or cell_text(value).startswith(_FORMULA) else shown


def to_csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV with a header, LF line ends; None is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([csv_cell(name) for name in columns])
    writer.writerows([csv_cell(value) for value in row] for row in rows)
    return out.getvalue()


def to_markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; nothing in a cell can end it, link, or be HTML."""
    lines = [columns, ["---"] * len(columns)]
    text = ["| " + " | ".join(map(markdown_cell, lines[0])) + " |", "|" + "|".join(lines[1]) + "|"]
    text += ["| " + " | ".join(markdown_cell(short(value)) for value in row) + " |" for row in rows]
    return "\n".join(text) + "\n"


def markdown_cell(value: Any) -> str:
    """Text with everything Markdown would act on escaped."""
    shown = escape(cell_text(value))
    for mark in "\\|`*[]<>#~":
        shown = shown.replace(mark, f"&{_ENTITY[mark]};" if mark in _ENTITY else "\\" + mark)
    return shown


_ENTITY = {"<": "lt", ">": "gt"}


def short(value: Any) -> Any:
    """A number for eyes: four digits that matter."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return value


def to_json(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """One strict ASCII JSON array of objects."""
    found = [plain(dict(zip(columns, row, strict=True))) for row in rows]
    return json.dumps(found, ensure_ascii=True, allow_nan=False)


GAP, FOLDED = 2, 10  # blanks between columns; what a column that folds wants at least


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, wide: Sequence[str] = (), gives_way: Sequence[str] = ()
) -> tuple[str, ...]:
    """A table on stdout, NULL as –. Numbers and what is not `wide` are never cut; `wide` columns fold.

    Where a terminal has no room, columns of `gives_way` are left out one after the other, and returned. Where it has
    none even so, and in a pipe, lines are as long as they are.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    texts = [["–" if value is None else escape(cell_text(short(value))) for value in row] for row in rows]
    widths = [max([len(name), *(Text(row[at]).cell_len for row in texts)]) for at, name in enumerate(columns)]
    folds = [name in wide for name in columns]
    shown = list(range(len(columns)))

    def needed() -> int:
        least = (min(widths[at], FOLDED) if folds[at] else widths[at] for at in shown)
        return sum(least) + GAP * len(shown)

    left_out: list[str] = []
    if sys.stdout.isatty():
        for name in gives_way:
            if needed() > console.width and name in columns:
                shown.remove(list(columns).index(name))
                left_out.append(name)
    if not sys.stdout.isatty() or needed() > console.width:
        console.width = sum(widths[at] for at in shown) + GAP * len(shown)
        console.soft_wrap = True
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    for at in shown:
        table.add_column(
            escape(columns[at]),
            justify="right" if any(isinstance(row[at], int | float) for row in rows) else "left",
            no_wrap=not folds[at],
            min_width=min(widths[at], FOLDED) if folds[at] else widths[at],
            overflow="fold",
        )
    for row in texts:
        table.add_row(*(Text(row[at]) for at in shown))
    console.print(table)
    return tuple(left_out)
