"""The cells of a route trace: the rows that share (turn, phase, step, layer), one for each routed expert.

In: rows in any order. Out: the same rows in the order of their cells, and sums over each. An engine writes decode in that
order already and prefill layer by layer; only what is out of order is sorted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from bmoe_collector.traces.arrays import Ints, packed, starts

CELL = ("turn", "phase", "step", "layer")


class Cells:
    """Rows by cell, and within one by the column `within`, else as they came.

    `begins` is where each cell begins in what `column` gives; a row of `keys` is a cell's. `height` is the number of rows.
    """

    def __init__(self, rows: pl.DataFrame, within: str | None = None) -> None:
        columns = [rows[name].to_numpy() for name in CELL]
        changes = np.zeros(rows.height, bool)
        changes[:1] = True
        for column in columns:
            changes[1:] |= column[1:] != column[:-1]
        begins = np.flatnonzero(changes)
        key = packed(*(column[begins] for column in columns))  # of each stretch of rows of one cell
        ordered = bool((key[1:] > key[:-1]).all())
        inner = None if within is None else rows[within].to_numpy()
        if inner is not None and ordered:
            ordered = bool((changes[1:] | (inner[1:] >= inner[:-1])).all())
        self._order: Ints | None = None
        if not ordered:
            each = np.repeat(key, np.diff(begins, append=rows.height))
            self._order = np.argsort(each if inner is None else packed(each, inner), kind="stable")
            begins = starts(each[self._order])
        first = begins if self._order is None else self._order[begins]
        self._rows = rows
        self.begins: Ints = begins
        self.height = rows.height
        self.keys = pl.DataFrame({name: column[first] for name, column in zip(CELL, columns, strict=True)})

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def widths(self) -> Ints:
        """Rows of each cell."""
        return np.diff(self.begins, append=self.height)

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column by cell. It has no nulls, or is of floats and they are nan."""
        values = self._rows[name].to_numpy()
        return values if self._order is None else values[self._order]

    def slice(self, name: str, first: int, last: int) -> list[Any]:
        """Values of the rows from `first` to before `last`, null as None."""
        if self._order is None:
            return self._rows[name][first:last].to_list()
        return self._rows[name].gather(self._order[first:last]).to_list()

    def sums(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Sum by cell of values in the order of `column`."""
        if not len(self.begins):
            return values[:0]
        return np.add.reduceat(values.astype(np.int64) if values.dtype == bool else values, self.begins)

    def most(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Largest by cell of values in the order of `column`."""
        return np.maximum.reduceat(values, self.begins) if len(self.begins) else values[:0]
