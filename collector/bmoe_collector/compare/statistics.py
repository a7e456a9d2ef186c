"""Two groups of runs against each other: ratio, interval, permutation test, what could have been resolved.

Everything works on logarithms of positive numbers, one a run (or one a block where the plan interleaved), so a
difference is a ratio. Runs are the replicates; tokens inside a run are autocorrelated and never counted as ones (law 8).

- Several metrics of the same runs are corrected together (`jointly`), several comparisons by Holm (`holm`).
- The p-value is of a permutation test: signs of the pairs' differences, or labels of the runs, all of them when they are
  few enough and a seeded draw of 20,000 otherwise. Under exchange it is valid whatever the distribution.
- The interval is a bootstrap percentile interval of the mean, its quantiles moved outward for small samples (a plain one
  is too narrow by sqrt((n-1)/n) and by the normal quantile where t belongs).
- `smallest_resolvable` is the relative difference these runs would have shown with probability 0.8 at level 0.05, and
  `runs_needed` how many pairs (or runs a side) would show the wanted difference that often, both from the spread seen here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np

from bmoe_collector.compare import student

LEVEL = 0.05
POWER = 0.8
DRAWS = 20_000
RESAMPLES = 10_000
MOST_RUNS = 10_000


@dataclass(frozen=True, slots=True)
class Effect:
    """What a comparison of one metric found; ratios are of B to A."""

    ratio: float
    low: float | None
    high: float | None
    p: float | None
    resolved: bool
    smallest_resolvable: float | None  # as a relative difference: 0.05 is 5 %
    runs_needed: int | None  # pairs, or runs a side
    can_resolve: bool  # whether any result of so few runs could be significant
    sd: float | None  # of the log differences (paired) or of the log values (unpaired)


def paired(
    a: Sequence[float], b: Sequence[float], wanted: float | None = None, seed: int = 1, *, wider: float = 1.0
) -> Effect:
    """Compare by blocks: `a[i]` and `b[i]` ran next to each other. All values are positive.

    `wider`: how many times the error of independent pairs the mean's error is, where neighbouring pairs share something.
    """
    differences = np.log(np.asarray(b, dtype=float)) - np.log(np.asarray(a, dtype=float))
    n = len(differences)
    if n == 0:
        raise ValueError("no pairs")
    mean = float(differences.mean())
    can = 2.0 / 2**n <= LEVEL
    if n < 2:
        return Effect(math.exp(mean), None, None, None, False, None, None, can, None)
    sd = float(differences.std(ddof=1))
    p = _sign_test(differences, seed, wider)
    means = mean + wider * (_means(differences, seed) - mean)
    low, high = _quantiles(means, n - 1, n)
    standard_error = wider * sd / math.sqrt(n)
    return Effect(
        math.exp(mean),
        math.exp(low),
        math.exp(high),
        p,
        can and p <= LEVEL,
        _smallest(standard_error, n - 1) if can else None,
        _runs_needed(mean, wanted, lambda count: (wider * sd / math.sqrt(count), count - 1), 6),
        can,
        sd,
    )


def unpaired(a: Sequence[float], b: Sequence[float], wanted: float | None = None, seed: int = 1) -> Effect:
    """Compare two groups whose runs have no partner. All values are positive."""
    x, y = np.log(np.asarray(a, dtype=float)), np.log(np.asarray(b, dtype=float))
    n, m = len(x), len(y)
    if n == 0 or m == 0:
        raise ValueError("an empty side")
    mean = float(y.mean() - x.mean())
    can = 2.0 / math.comb(n + m, n) <= LEVEL
    if n < 2 or m < 2:
        return Effect(math.exp(mean), None, None, None, False, None, None, False, None)
    pooled = math.sqrt((float(x.var(ddof=1)) * (n - 1) + float(y.var(ddof=1)) * (m - 1)) / (n + m - 2))
    p = _label_test(x, y, seed)
    means = _means(y, seed) - _means(x, seed + 1)
    low, high = _quantiles(means, n + m - 2, min(n, m))
    standard_error = pooled * math.sqrt(1 / n + 1 / m)
    return Effect(
        math.exp(mean),
        math.exp(low),
        math.exp(high),
        p,
        can and p <= LEVEL,
        _smallest(standard_error, n + m - 2) if can else None,
        _runs_needed(mean, wanted, lambda count: (pooled * math.sqrt(2 / count), 2 * count - 2), 4),
        can,
        pooled,
    )


def within_run(a: Sequence[float], b: Sequence[float], seed: int = 1) -> tuple[float, float, float]:
    """Ratio of the mean of `b` to that of `a` with a circular block bootstrap interval over the tokens of one run each.

    The block length follows the lag-1 autocorrelation. It says how steady the two runs were, not how runs differ.
    """
    x, y = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    rng = np.random.default_rng(seed)
    ratios = _block_means(y, rng) / _block_means(x, rng)
    low, high = np.quantile(ratios, [LEVEL / 2, 1 - LEVEL / 2])
    return float(y.mean() / x.mean()), float(low), float(high)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """P-values corrected for their number (Holm's step-down); None stays None and does not count."""
    order = sorted((value, at) for at, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    highest = 0.0
    for rank, (value, at) in enumerate(order):
        highest = max(highest, min(1.0, value * (len(order) - rank)))
        corrected[at] = highest
    return corrected


def drift(values: Sequence[float], seed: int = 1) -> tuple[float, float]:
    """Spearman's correlation of values with their order, and its permutation p-value."""
    n = len(values)
    if n < 4:
        return 0.0, 1.0
    ranks = _ranks(np.asarray(values, dtype=float))
    order = np.arange(n, dtype=float)
    order -= order.mean()
    scale = math.sqrt(float((ranks**2).sum() * (order**2).sum()))
    if scale == 0:
        return 0.0, 1.0
    seen = float(ranks @ order) / scale
    rng = np.random.default_rng(seed)
    drawn = rng.permuted(np.tile(ranks, (4000, 1)), axis=1) @ order / scale
    return seen, (1 + int((np.abs(drawn) >= abs(seen) - 1e-12).sum())) / 4001


def pairs_resolve(pairs: int, sd: float) -> float | None:
    """The relative difference `pairs` pairs would show with probability 0.8 when single runs spread by `sd` (relative)."""
    if 2.0 / 2**pairs > LEVEL:
        return None
    return _smallest(sd * math.sqrt(2 / pairs), pairs - 1)


def _ranks(values: Any) -> Any:
    order = values.argsort(kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(len(values), dtype=float)
    for value in np.unique(values):
        same = values == value
        ranks[same] = ranks[same].mean()
    return ranks - ranks.mean()


def _sign_test(differences: Any, seed: int, wider: float = 1.0) -> float:
    seen = abs(float(differences.sum())) / wider
    flips, exact = _flips(seed, len(differences))
    # Not `@`: for a matrix this small the linear algebra library's threads cost more than the sums.
    sums = np.abs(np.einsum("ij,j->i", flips, differences))
    return _share(sums >= seen - 1e-12 * (1 + seen), exact)


def _label_test(x: Any, y: Any, seed: int) -> float:
    both = np.concatenate([x, y])
    n, total = len(x), len(x) + len(y)
    everything = float(both.sum())
    deals, exact = _deals(seed, total, n)

    def distance(sums: Any) -> Any:
        return np.abs((everything - sums) / (total - n) - sums / n)

    seen = float(distance(np.array([x.sum()]))[0])
    return _share(distance(np.einsum("ij,j->i", deals, both)) >= seen - 1e-12 * (1 + seen), exact)


def jointly(metrics: Sequence[tuple[Sequence[float], Sequence[float]]], *, pairs: bool, seed: int = 1) -> list[float]:
    """P-values of several metrics of the same runs, corrected for their number (Westfall and Young's single-step maximum).

    Every metric's runs are exchanged together, so what moves together is not corrected for twice. Each element is the
    metric's values of A and of B, positive, as `paired` or `unpaired` takes them; all of one length.
    """
    if not metrics:
        return []
    if pairs:
        table = np.array([np.log(b) - np.log(a) for a, b in metrics]).T
        exchanges, exact = _flips(seed, len(table))
        scale = np.sqrt((table**2).sum(axis=0))
        seen = np.abs(table.sum(axis=0))
    else:
        table = np.array([np.log([*a, *b]) for a, b in metrics]).T
        n = len(metrics[0][0])
        exchanges, exact = _deals(seed, len(table), n)
        table = table - table.mean(axis=0)  # a side's sum is then its distance from the other side, but for a factor
        scale = np.sqrt((table**2).sum(axis=0))
        seen = np.abs(table[:n].sum(axis=0))
    # Divided by what no exchange changes, so that a statistic rises with its t.
    scale = np.where(scale > 1e-12, scale, np.inf)
    highest = (np.abs(np.einsum("ij,jk->ik", exchanges, table)) / scale).max(axis=1)
    return [_share(highest >= one - 1e-9, exact) for one in seen / scale]


def _share(as_far: Any, exact: bool) -> float:
    """A p-value: the share of all exchanges, or of the drawn ones with the one that was seen."""
    return float(as_far.mean()) if exact else (1 + int(as_far.sum())) / (DRAWS + 1)


# One comparison asks the same of every metric: what is drawn depends on the seed and the counts alone, so it is drawn once.
@lru_cache(maxsize=4)
def _flips(seed: int, n: int) -> tuple[Any, bool]:
    """Rows of +1 and -1: all of them, or a draw."""
    if n <= 14:
        return 1.0 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1), True
    return np.random.default_rng(seed).choice([-1.0, 1.0], (DRAWS, n)), False


@lru_cache(maxsize=4)
def _deals(seed: int, total: int, n: int) -> tuple[Any, bool]:
    """Rows with a 1 at the `n` runs dealt to A: all divisions, or a draw."""
    if math.comb(total, n) > DRAWS:
        keys = np.random.default_rng(seed).random((DRAWS, total))
        return (keys <= np.partition(keys, n - 1, axis=1)[:, n - 1 : n]).astype(float), False
    chosen = np.array(list(combinations(range(total), n)))
    dealt = np.zeros((len(chosen), total))
    np.put_along_axis(dealt, chosen, 1.0, axis=1)
    return dealt, True


@lru_cache(maxsize=4)
def _resampled(seed: int, n: int) -> Any:
    """Rows of the share that each of `n` values has in one resample: a row times the values is its mean."""
    drawn = np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))
    drawn += np.arange(RESAMPLES)[:, None] * n
    return np.bincount(drawn.ravel(), minlength=RESAMPLES * n).reshape(RESAMPLES, n) / n


def _means(values: Any, seed: int) -> Any:
    return np.einsum("ij,j->i", _resampled(seed, len(values)), values)


def _quantiles(means: Any, df: int, smallest_group: int) -> tuple[float, float]:
    outward = math.sqrt(smallest_group / max(1, smallest_group - 1)) * student.quantile(max(1, df), 1 - LEVEL / 2)
    tail = student.normal_below(-outward)
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def _detectable(df: int) -> float:
    return student.quantile(df, 1 - LEVEL / 2) + student.quantile(df, POWER)


def _smallest(standard_error: float, df: int) -> float:
    return math.expm1(_detectable(df) * standard_error)


def _runs_needed(mean: float, wanted: float | None, spread: Any, fewest: int) -> int | None:
    """The smallest count whose detectable difference is the wanted one, or the one seen; None past a sane number."""
    target = math.log1p(wanted) if wanted else abs(mean)
    if target <= 0:
        return None
    low, high = fewest, MOST_RUNS
    standard_error, df = spread(high)
    if _detectable(df) * standard_error > target:
        return None
    while low < high:
        middle = (low + high) // 2
        standard_error, df = spread(middle)
        if _detectable(df) * standard_error <= target:
            high = middle
        else:
            low = middle + 1
    return low


def _block_means(values: Any, rng: Any) -> Any:
    n = len(values)
    centred = values - values.mean()
    variance = float(centred @ centred)
    lag1 = float(centred[1:] @ centred[:-1]) / variance if variance > 0 and n > 2 else 0.0
    rho = min(0.95, max(0.0, lag1))
    length = max(1, min(n, round((2 * rho / (1 - rho**2)) ** (2 / 3) * n ** (1 / 3)) + 1))
    blocks = math.ceil(n / length)
    resamples = max(200, min(2000, 4_000_000 // max(1, n)))
    starts = rng.integers(0, n, (resamples, blocks))
    places = (starts[:, :, None] + np.arange(length)).reshape(resamples, -1)[:, :n] % n
    return values[places].mean(axis=1)
