"""Arithmetic on measured values: sequences that may hold None and NaN go in, one number or None comes out.

Nothing here invents a value: an aggregate of nothing is None, never zero (law 5).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


def number(value: Any) -> float | None:
    """`value` as a finite float, or None when it is no number (a flag counts as 0 or 1)."""
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    return None


def known(values: Iterable[Any]) -> list[float]:
    """The finite numbers among `values`, in order."""
    return [float(value) for value in values if isinstance(value, (int, float)) and math.isfinite(value)]


def total(values: Iterable[Any]) -> float | None:
    """Sum of what is known, None when nothing is."""
    found = known(values)
    return math.fsum(found) if found else None


def mean(values: Iterable[Any]) -> float | None:
    """Mean of what is known."""
    found = known(values)
    return math.fsum(found) / len(found) if found else None


def quantile(values: Iterable[Any], share: float) -> float | None:
    """The value below which `share` of the known ones lie, linear between the two nearest."""
    found = sorted(known(values))
    if not found:
        return None
    at = share * (len(found) - 1)
    low = math.floor(at)
    high = min(low + 1, len(found) - 1)
    return found[low] + (found[high] - found[low]) * (at - low)


def median(values: Iterable[Any]) -> float | None:
    """Middle of what is known."""
    return quantile(values, 0.5)


def spread(values: Iterable[Any]) -> float | None:
    """A standard deviation that one outlier cannot move: 1.4826 times the median distance from the median."""
    found = known(values)
    middle = median(found)
    if middle is None:
        return None
    away = median(abs(value - middle) for value in found)
    return None if away is None else 1.4826 * away


def ratio(above: Any, below: Any) -> float | None:
    """`above` / `below`, None when either is unknown or the divisor is not positive."""
    top, bottom = number(above), number(below)
    if top is None or bottom is None or bottom <= 0:
        return None
    return top / bottom


def first_known(values: Iterable[Any]) -> float | None:
    """The first known number."""
    return next(iter(known(values)), None)


def last_known(values: Sequence[Any]) -> float | None:
    """The last known number."""
    return first_known(reversed(values))


@dataclass(frozen=True, slots=True)
class Distribution:
    """How one quantity lay over the tokens of a run, in the quantity's own unit."""

    n: int
    mean: float
    median: float
    p5: float
    p50: float
    p95: float
    min: float
    max: float

    def to_json(self) -> dict[str, float]:
        """A JSON object of the same names."""
        return asdict(self)


def distribution(values: Iterable[Any]) -> Distribution | None:
    """The distribution of what is known, None when nothing is."""
    found = sorted(known(values))
    if not found:
        return None
    middle = quantile(found, 0.5) or 0.0
    return Distribution(
        n=len(found),
        mean=math.fsum(found) / len(found),
        median=middle,
        p5=quantile(found, 0.05) or 0.0,
        p50=middle,
        p95=quantile(found, 0.95) or 0.0,
        min=found[0],
        max=found[-1],
    )
