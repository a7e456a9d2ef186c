"""Settings that alternate inside one run: each block of B against the mean of the A blocks around it.

Patched engines switch a setting every so many tokens and say so in a column of the metrics CSV (`arm`,
`tokens_since_switch`, …). In: token rows and the column. Out: for each pair of settings the ratio of B's cost to A's over the
sandwiches A B A, after a cold window at the start of the run and a carry-over after every switch; both windows are shown at
other values too, since an effect that depends on them is theirs. Sandwiches are the replicates. Neighbours share the A block
between them: it enters each with one half, so that they correlate by up to (1/4) / (3/2) = 1/6, and the error is taken as much wider.
The result is of one run and says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bmoe_collector.common import UserError
from bmoe_collector.compare.statistics import Effect, paired

COLD_TOKENS = 32
CARRY_TOKENS = 8
SHARED = 1 / 6
"""Correlation of two sandwiches that share a block."""
OTHER_COLD = (0, 64)
OTHER_CARRY = (0, 16)


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive tokens of one setting: its value, the cost of what was kept, and how many tokens that is."""

    value: Any
    mean_ms: float
    tokens: int


def blocks_of(settings: Sequence[Any], costs_ms: Sequence[float | None], cold: int, carry: int) -> list[Block]:
    """Cut rows where the setting switches; leave out the first `cold` tokens and `carry` after each switch."""
    found: list[Block] = []
    start = 0
    for at in range(1, len(settings) + 1):
        if at < len(settings) and settings[at] == settings[start]:
            continue
        first = max(start + (carry if start else 0), cold)
        kept = [cost for cost in costs_ms[first:at] if cost is not None and cost > 0]
        if kept and settings[start] is not None:
            found.append(Block(settings[start], sum(kept) / len(kept), len(kept)))
        start = at
    return found


def sandwiches(blocks: Sequence[Block], a: Any, b: Any) -> tuple[list[float], list[float], int]:
    """For every block of `b` between two of `a`: the geometric mean of the two, its own; and how many share a block of `a`."""
    around, own = [], []
    shared = 0
    last: int | None = None
    for at, (before, middle, after) in enumerate(zip(blocks, blocks[1:], blocks[2:], strict=False)):
        if middle.value == b and before.value == a and after.value == a:
            around.append(math.sqrt(before.mean_ms * after.mean_ms))
            own.append(middle.mean_ms)
            shared += last is not None and at == last + 2
            last = at
    return around, own, shared


def compare_by(
    columns: Mapping[str, Sequence[Any]],
    column: str,
    costs_ms: Sequence[float | None],
    cold: int = COLD_TOKENS,
    carry: int = CARRY_TOKENS,
) -> dict[str, Any]:
    """Every ordered pair of settings that has sandwiches, at the windows asked for and at others.

    Raises:
        UserError: no such column, or it does not switch.
    """
    if column not in columns:
        raise UserError(f"--by {column}: the run's rows have no such column; they have {', '.join(columns)}")
    settings = list(columns[column])
    values = sorted({value for value in settings if value is not None}, key=str)
    if len(values) < 2:
        raise UserError(f"--by {column}: it never switches (its only value is {values[0] if values else 'unmeasured'})")
    if len(values) > 16:
        raise UserError(f"--by {column}: {len(values)} values: that is no setting that alternates")
    pairs = []
    for at, a in enumerate(values):
        for b in values[at + 1 :]:
            main = _effect(settings, costs_ms, a, b, cold, carry)
            if main is None:
                continue
            others = []
            for other_cold, other_carry in [
                *((value, carry) for value in OTHER_COLD),
                *((cold, value) for value in OTHER_CARRY),
            ]:
                other = _effect(settings, costs_ms, a, b, other_cold, other_carry)
                others.append(
                    {"cold": other_cold, "carry": other_carry, **(_row(other) if other else {"sandwiches": 0})}
                )
            pairs.append({"a": a, "b": b, **_row(main), "at_other_windows": others})
    if not pairs:
        raise UserError(f"--by {column}: no block stands between two of another setting after {cold} cold tokens")
    return {
        "design": "sandwich",
        "by": column,
        "cold": cold,
        "carry": carry,
        "pairs": pairs,
        "label": "exploration, within one run",
    }


@dataclass(frozen=True, slots=True)
class _Found:
    """An effect of rates, B to A, and the cost of a token in every sandwich: of the A blocks around, and of the B block."""

    effect: Effect
    a_ms: Sequence[float]
    b_ms: Sequence[float]


def _effect(
    settings: Sequence[Any], costs_ms: Sequence[float | None], a: Any, b: Any, cold: int, carry: int
) -> _Found | None:
    around, own, shared = sandwiches(blocks_of(settings, costs_ms, cold, carry), a, b)
    if not own:
        return None
    wider = math.sqrt(1 + 2 * SHARED * shared / len(own))
    # Costs are the rate's inverse: A's over B's is the ratio of rates, B to A.
    return _Found(paired(own, around, wider=wider), around, own)


def _row(found: _Found) -> dict[str, Any]:
    effect = found.effect
    return {
        "metric": "tok_s",
        "a_tok_s": 1e3 / median(found.a_ms),
        "b_tok_s": 1e3 / median(found.b_ms),
        "ratio": effect.ratio,
        "low": effect.low,
        "high": effect.high,
        "p": effect.p,
        "resolved": effect.resolved,
        "smallest_resolvable": effect.smallest_resolvable,
        "sandwiches": len(found.b_ms),
    }
