"""Which cell runs when. In: names of cells and an order. Out: places (cell, repeat, block) in the order they run.

Runs of one block are what a paired comparison may pair: they ran next to each other. `listed` runs each cell's repeats in a row
and shares no block, because order and setting cannot be told apart there.

- `interleaved`: A B C, A B C, …; a block a round
- `reversed`: A B C, C B A, …; a block a round
- `abba`: A B C C B A, …; a block two rounds
- `random`: every round shuffled by the recorded seed; a block a round
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """One run of the plan: which cell (by its number), which of its repeats, in which block."""

    cell: int
    repeat: int
    block: int


def places(repeats: Sequence[int], order: str, seed: int = 0) -> list[Place]:
    """Every run in its order; each (cell, repeat) exactly once. `repeats` has how often each cell runs.

    A cell that runs less often than others is missing from the last rounds.

    Raises:
        ValueError: an order nobody knows.
    """
    if order == "listed":
        runs = [(cell, repeat) for cell, count in enumerate(repeats) for repeat in range(count)]
        return [Place(cell, repeat, at) for at, (cell, repeat) in enumerate(runs)]
    return [
        Place(cell, repeat, repeat // 2 if order == "abba" else repeat)
        for repeat in range(max(repeats, default=0))
        for cell in _round(len(repeats), repeat, order, seed)
        if repeat < repeats[cell]
    ]


def _round(cells: int, repeat: int, order: str, seed: int) -> Sequence[int]:
    if order == "interleaved":
        return range(cells)
    if order in {"reversed", "abba"}:
        return range(cells) if repeat % 2 == 0 else range(cells - 1, -1, -1)
    if order == "random":
        shuffled = list(range(cells))
        random.Random(f"{seed}/{repeat}").shuffle(shuffled)
        return shuffled
    raise ValueError(f"no such order: {order}")
