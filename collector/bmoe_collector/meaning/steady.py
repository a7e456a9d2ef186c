"""Where warm-up ends, found from the data: the costs of a turn's decodes in, the number of warm-up tokens out.

The first tokens after prefill pay for cache churn (contract, `mgmt_ms`), so a short run times the cold head. The cut is
the one that leaves the tail with the smallest standard error of its mean (MSER over batches of five decodes), looked for
in the first half only; without a head that is slower than the tail by more than noise there is no warm-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from bmoe_collector.meaning.groups import Group
from bmoe_collector.meaning.numbers import mean, median, ratio, spread, total

BATCH = 5
FEWEST = 20
"""Decodes below which a warm-up cannot be told from noise."""
NEARLY = 1.5
"""A cut whose error is within this factor of the best is as good."""
NOTABLE = 0.05
"""A head that is slower than the tail by less than this share is no warm-up."""


@dataclass(frozen=True, slots=True)
class Steady:
    """The cut between warm-up and steady state of one turn."""

    found: bool  # False: too short to tell, or no steady state before the middle
    warmup_tokens: int | None
    warmup_s_tok: float | None
    steady_s_tok: float | None
    steady_tok_s: float | None


def steady_state(decodes: Sequence[Group]) -> Steady:
    """Find the cut of one turn."""
    timed = [group for group in decodes if group.wall_ms is not None]
    costs = [group.wall_ms / group.batch for group in timed if group.wall_ms is not None]
    if len(costs) < FEWEST:
        return Steady(found=False, warmup_tokens=None, warmup_s_tok=None, steady_s_tok=None, steady_tok_s=None)
    cut = _mser(costs)
    head, tail = costs[:cut], costs[cut:]
    half = len(costs) // 2
    settled = cut < half - BATCH
    if head and not _slower(head, tail):
        cut = 0
        settled = True
    steady = _per_token_s(timed[cut:])
    return Steady(
        found=settled,
        warmup_tokens=sum(group.tokens for group in timed[:cut]),
        warmup_s_tok=_per_token_s(timed[:cut]),
        steady_s_tok=steady,
        steady_tok_s=ratio(1.0, steady),
    )


def _mser(costs: Sequence[float]) -> int:
    """Index of the best cut, a multiple of BATCH in the first half."""
    batches = [sum(costs[at : at + BATCH]) / BATCH for at in range(0, len(costs) - BATCH + 1, BATCH)]
    # Sums from the back, so each cut costs O(1).
    sums = [0.0, *accumulate(reversed(batches))]
    squares = [0.0, *accumulate(value * value for value in reversed(batches))]
    errors = []
    for cut in range(len(batches) // 2 + 1):
        n = len(batches) - cut
        errors.append(max(squares[n] / n - (sums[n] / n) ** 2, 0.0) / n)
    # The minimum is flat: of the cuts that are nearly as good the earliest keeps most of the run.
    limit = min(errors) * NEARLY
    return next(cut for cut, error in enumerate(errors) if error <= limit) * BATCH


def _slower(head: Sequence[float], tail: Sequence[float]) -> bool:
    """True when the head is slower than the tail by more than its noise."""
    level, noise, typical = mean(head), spread(tail), median(tail)
    if level is None or typical is None or noise is None:
        return False
    return level > typical * (1 + NOTABLE) and level > typical + 2 * noise / len(head) ** 0.5


def _per_token_s(timed: Sequence[Group]) -> float | None:
    whole = total(group.wall_ms for group in timed)
    confirmed = sum(group.batch for group in timed)
    return ratio(whole, confirmed * 1e3)
