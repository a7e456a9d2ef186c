"""Quantiles of Student's t and shares of the normal distribution: numbers in, a number out.

Small enough to have here: the library that has them takes longer to import than a comparison takes to answer. A test
holds both against each other.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

_TINY = 1e-300


def normal_below(value: float) -> float:
    """Share of the normal distribution below a value."""
    return math.erfc(-value / math.sqrt(2)) / 2


@lru_cache(maxsize=4096)
def quantile(df: float, share: float) -> float:
    """The value below which `share` of the t distribution with `df` degrees of freedom lies; `df` positive, 0 < share < 1."""
    if share < 0.5:
        return -quantile(df, 1 - share)
    low, high = 0.0, 1.0
    while below(high, df) < share:
        low, high = high, high * 2
    log_scale = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    at = min(max(NormalDist().inv_cdf(share), low), high)
    for _ in range(100):
        off = below(at, df) - share
        low, high = (at, high) if off < 0 else (low, at)
        density = math.exp(log_scale - (df + 1) / 2 * math.log1p(at * at / df))
        following = at - off / density if density else low
        if not low < following < high:
            following = (low + high) / 2
        if abs(following - at) <= 1e-12 * max(1.0, at):
            return following
        at = following
    return at


def below(value: float, df: float) -> float:
    """Share of the t distribution with `df` degrees of freedom below a value."""
    tail = _beta(df / 2, 0.5, df / (df + value * value)) / 2
    return 1 - tail if value > 0 else tail


def _beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Lentz)."""
    if x >= 1:
        return 1.0
    if x <= 0:
        return 0.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x > (a + 1) / (a + b + 2):
        return 1 - front * _fraction(b, a, 1 - x) / b
    return front * _fraction(a, b, x) / a


def _fraction(a: float, b: float, x: float) -> float:
    c, d = 1.0, 1 / _large(1 - (a + b) * x / (a + 1))
    found = d
    for m in range(1, 10_000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _large(1 + term * d)
            c = _large(1 + term / c)
            found *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return found


def _large(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
