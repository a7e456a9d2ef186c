"""Tokens of a run as a table for the terminal: a RunRecord in, something rich can print out."""

from __future__ import annotations

from rich.table import Table

from bmoe_collector.record import RunRecord
from bmoe_collector.show.document import NOT_TOKENS
from bmoe_collector.show.words import NOTHING

FIRST = ("turn", "step")


def token_table(record: RunRecord) -> Table:
    """One line a token, only the columns that hold anything."""
    rows = record.tokens()
    names = [name for name in rows.columns if name not in NOT_TOKENS and name not in FIRST]
    names = [name for name in names if any(value is not None for value in rows.columns[name])]
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in (*FIRST, *names):
        table.add_column(name, justify="right")
    for values in zip(*(rows.get(name) for name in (*FIRST, *names)), strict=True):
        table.add_row(*(_cell(value) for value in values))
    return table


def _cell(value: object) -> str:
    if value is None:
        return NOTHING
    return f"{value:g}" if isinstance(value, float) else str(value)
