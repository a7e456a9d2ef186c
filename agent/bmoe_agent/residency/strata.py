"""Which pages to look at, and what they say of the ones not looked at. Pure.

In: ranges of pages of a part of the model, and how many pages may be looked at. Out: pages drawn at random, and from their
answers a fraction with its standard error.

The part's pages, laid end to end, are cut into strata of equal size and two pages drawn from each without replacement. With two in
a stratum the variance inside it can be estimated without bias: (a - b)² / 4 for the mean of the two. Residency comes in runs, so
nearby pages agree and the strata take most of the variance away.

Agreement everywhere does not make an error of 0: n pages that were all absent still allow about 1/n of the part to be resident. So
the error is never given as less than that of n free draws that found half a page.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt


@dataclass(frozen=True, slots=True)
class PageRange:
    """Pages first..last-1 of one shard."""

    shard: int
    first: int
    last: int


class Pages:
    """The pages of a part, addressed by their place from 0 over all its ranges."""

    def __init__(self, ranges: Sequence[PageRange]) -> None:
        self.ranges = [one for one in ranges if one.last > one.first]
        self._ends = list(accumulate(one.last - one.first for one in self.ranges))
        self.count = self._ends[-1] if self._ends else 0

    def at(self, place: int) -> tuple[int, int]:
        """(shard, page) of a place."""
        number = bisect_right(self._ends, place)
        one = self.ranges[number]
        return one.shard, one.last - (self._ends[number] - place)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What was found of `pages` pages."""

    pages: int
    looked_at: int
    resident: int
    fraction: float
    variance: float  # of the fraction

    @property
    def standard_error(self) -> float:
        """0 only when every page was looked at."""
        return sqrt(self.variance)


def draw(pages: int, budget: int, source: random.Random) -> list[tuple[int, ...]]:
    """Places to look at, one tuple a stratum: two random places of each, or all places when there are no more than the budget."""
    if pages <= budget or pages < 4:
        return [(place,) for place in range(pages)]
    strata = max(1, budget // 2)
    drawn: list[tuple[int, ...]] = []
    for number in range(strata):
        begin, end = number * pages // strata, (number + 1) * pages // strata
        if end - begin < 2:
            drawn.append((begin,))
            continue
        # int(random() * n) instead of randrange: several times cheaper, and n is far below 2**53.
        first = begin + int(source.random() * (end - begin))
        second = begin + int(source.random() * (end - begin - 1))
        drawn.append((first, second + (second >= first)))
    return drawn


def estimate(pages: int, answers: Sequence[Sequence[int]], strata_pages: Sequence[int] | None = None) -> Estimate:
    """The fraction of `pages` resident, from the answers of each stratum of `draw` (of equal size unless sizes are given)."""
    looked = sum(len(answer) for answer in answers)
    resident = sum(sum(answer) for answer in answers)
    if not pages or not looked:
        return Estimate(pages, 0, 0, 0.0, 0.0)
    if looked >= pages:
        return Estimate(pages, looked, resident, resident / pages, 0.0)
    count = len(answers)
    sizes = strata_pages or [(n + 1) * pages // count - n * pages // count for n in range(count)]
    fraction = variance = 0.0
    for size, answer in zip(sizes, answers, strict=True):
        weight = size / pages
        fraction += weight * sum(answer) / len(answer)
        if len(answer) == 2 and answer[0] != answer[1]:
            variance += weight * weight * (1 - 2 / size) / 4
    if resident == looked:
        fraction = 1.0  # not what rounding makes of the weights
    half_a_page = 0.5 / (looked + 1)
    floor = half_a_page * (1 - half_a_page) / (looked + 1) * (1 - looked / pages)
    return Estimate(pages, looked, resident, fraction, max(variance, floor))


def together(parts: Sequence[Estimate]) -> Estimate:
    """The estimate for several disjoint parts taken as one."""
    pages = sum(part.pages for part in parts)
    if not pages:
        return Estimate(0, 0, 0, 0.0, 0.0)
    return Estimate(
        pages,
        sum(part.looked_at for part in parts),
        sum(part.resident for part in parts),
        sum(part.fraction * part.pages for part in parts) / pages,
        sum(part.variance * (part.pages / pages) ** 2 for part in parts),
    )


def shares(pages: Sequence[int], budget: int, least: int) -> list[int]:
    """How much of a budget each part gets: by the root of its size, so that a small part is not lost beside a large one."""
    weights = [sqrt(count) for count in pages]
    total = sum(weights) or 1.0
    return [min(count, max(least, int(budget * weight / total))) for count, weight in zip(pages, weights, strict=True)]
