"""Columns as whole arrays of integers: dense codes, packed keys and stretches of equal values.

Sorting and comparing tuples of a routing (its step, layer, expert) is slow; one integer that orders as the tuple does is
fast. Arrays in, arrays out; nothing here knows what a trace is.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
_MOST = 1 << 62


def dense(values: npt.NDArray[np.integer]) -> tuple[Ints, Ints]:
    """Codes 0, 1, 2 … in the order of the values, and the distinct values they stand for."""
    whole = values.astype(np.int64, copy=False)
    if not len(whole):
        return whole, whole
    low, high = int(whole.min()), int(whole.max())
    if high - low <= 4 * len(whole) + 1024:
        shifted = whole - low
        seen = np.zeros(high - low + 1, bool)
        seen[shifted] = True
        return (np.cumsum(seen) - 1)[shifted], np.flatnonzero(seen) + low
    distinct = once(np.sort(whole))
    return np.searchsorted(distinct, whole), distinct


def packed(*columns: npt.NDArray[np.integer]) -> Ints:
    """One integer a row, not negative, that orders as the tuple of the columns and is equal where the tuple is."""
    key, span = _from_zero(columns[0])
    for column in columns[1:]:
        part, size = _from_zero(column)
        if span * size >= _MOST:  # as many values as rows at most, so that two always fit
            key, part = dense(key)[0], dense(part)[0]
            span, size = int(key.max()) + 1, int(part.max()) + 1
        key = key * size + part
        span *= size
    return key


def _from_zero(values: npt.NDArray[np.integer]) -> tuple[Ints, int]:
    whole = values.astype(np.int64, copy=False)
    if not len(whole):
        return whole, 1
    low, high = int(whole.min()), int(whole.max())
    if high - low >= _MOST:
        codes, distinct = dense(whole)
        return codes, len(distinct)
    return whole - low, high - low + 1


def starts(ordered: npt.NDArray[np.integer]) -> Ints:
    """Where each stretch of equal values begins."""
    if not len(ordered):
        return np.zeros(0, np.int64)
    return np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))


def once(ordered: Ints) -> Ints:
    """Sorted values without repeats."""
    return ordered[starts(ordered)]


def nearest(ordered: npt.NDArray[np.integer], quantile: float) -> int | None:
    """The nearest-rank percentile of sorted values: one that was seen, never one between two."""
    if not len(ordered):
        return None
    return int(ordered[max(1, math.ceil(quantile * len(ordered))) - 1])


def nearest_counted(counts: Ints, quantile: float) -> int | None:
    """The same, of values 0, 1, 2 … that occurred `counts` times."""
    total = int(counts.sum())
    if not total:
        return None
    return int(np.searchsorted(np.cumsum(counts), max(1, math.ceil(quantile * total))))
