"""Rows as text that is safe wherever it lands: CSV for spreadsheets, Markdown, tables for the terminal.

In: column names and rows of plain values. Out: text. A cell of CSV that a spreadsheet would run as a formula gets an
apostrophe in front; control characters are written out everywhere, so no name of a model or phone can act.
"""

from __future__ import annotations

import csv
import io
import json
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


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, wide: Sequence[str] = ()) -> None:
    """A table on stdout; `wide` columns fold, the others keep their width. A pipe gets whole lines."""
    import sys

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    texts = [[escape(cell_text(short(value))) for value in row] for row in rows]
    for at, name in enumerate(columns):
        number = any(isinstance(row[at], int | float) for row in rows)
        table.add_column(
            escape(name),
            justify="right" if number else "left",
            no_wrap=name not in wide,
            overflow="fold" if name in wide or number else "ellipsis",
        )
    for row in texts:
        table.add_row(*(Text(text) for text in row))
    if not sys.stdout.isatty():
        console.width = 1 + sum(
            max([len(columns[at]), *(len(row[at]) for row in texts)]) + 2 for at in range(len(columns))
        )
    console.print(table)
