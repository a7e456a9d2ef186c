"""What each decode cost: the token rows of one run in, one Group per `llama_decode` out.

Without speculation a decode confirms one token and a row is a group. Under `--mtp` and `--ngram` a verify decode
confirms several; its whole cost stands in the group's first row, the others carry zeros, and the cost of each of its
tokens is the first row's divided by `mtp_batch` (contract, "Per-token rows", `mtp_batch`). Stdout has no `mtp_batch`:
there a group is a row and the all-zero rows after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bmoe_collector.meaning.numbers import number
from bmoe_collector.record import Rows


@dataclass(frozen=True, slots=True)
class Group:
    """One decode: the turn it belongs to, its row, how many tokens it confirmed and what each of them cost."""

    turn: Any
    row: int  # index of the group's first row
    tokens: int  # rows the group really has: the last one of a cut file may be short
    batch: int  # tokens the decode confirmed, by which its cost is divided
    wall_ms: float | None  # the whole decode

    @property
    def token_ms(self) -> float | None:
        """Cost of one token of the group."""
        return None if self.wall_ms is None else self.wall_ms / self.batch


def groups(rows: Rows, *, speculative: bool) -> list[Group]:
    """The decodes behind `rows`, in order. Rows lost at the front of a group leave a group that is not charged."""
    turns, walls, batches = rows.get("turn"), rows.get("wall_ms"), rows.get("mtp_batch")
    found: list[Group] = []
    at = 0
    while at < len(rows):
        wall = number(walls[at])
        batch = number(batches[at])
        size = 1
        if speculative:
            limit = int(batch) if batch is not None and batch >= 1 else len(rows)
            while size < limit and _follows(at + size, turns[at], turns, walls):
                size += 1
        divisor = int(batch) if speculative and batch is not None and batch >= 1 else size
        orphan = speculative and divisor > 1 and wall == 0
        found.append(Group(turns[at], at, size, max(divisor, 1), None if orphan else wall))
        at += size
    return found


def _follows(at: int, turn: Any, turns: list[Any], walls: list[Any]) -> bool:
    """True for a later row of the same group: same turn, and nothing charged to it."""
    return at < len(walls) and turns[at] == turn and number(walls[at]) == 0


def token_costs_ms(found: list[Group]) -> list[float | None]:
    """The cost of every token, a group's shared evenly among its rows."""
    return [group.token_ms for group in found for _ in range(group.tokens)]
