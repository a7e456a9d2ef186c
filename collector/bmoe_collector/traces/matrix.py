"""The matrix view of a route trace: which experts each cell routed (contract, "Route trace").

A quarter of a million cells is usual and a terminal shows forty of them: rows are made when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, overload

from bmoe_collector.traces.cells import CELL, Cells
from bmoe_collector.traces.read import Selection, Trace, View
from bmoe_collector.traces.route import PHASES

_PAYLOAD = {"experts": "expert", "weights": "weight", "residency": "residency", "dropped": "dropped"}
_PIECE = 8192


def matrix(trace: Trace, chosen: Selection) -> View:
    """Which experts each cell routed: one row a cell, experts in the router's order."""
    columns = (*CELL, "slot", *_PAYLOAD.values())
    rows = MatrixRows(Cells(trace.rows(chosen, *columns).collect(engine="streaming"), within="slot"))
    return View("matrix", {"cells": len(rows)}, rows, trace.notes())


class MatrixRows(Sequence[dict[str, Any]]):
    """The rows of the view over sorted routings, made when they are asked for."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._bounds = [*cells.begins.tolist(), cells.height]

    def __len__(self) -> int:
        return len(self._cells)

    @overload
    def __getitem__(self, at: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, at: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, at: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(at, slice):
            first, last, step = at.indices(len(self))
            return self._between(first, last) if step == 1 else [self[each] for each in range(first, last, step)]
        place = range(len(self))[at]
        return self._between(place, place + 1)[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for first in range(0, len(self), _PIECE):
            yield from self._between(first, min(first + _PIECE, len(self)))

    def _between(self, first: int, last: int) -> list[dict[str, Any]]:
        bounds = self._bounds[first : last + 1]
        if len(bounds) < 2:
            return []
        held = {name: self._cells.slice(column, bounds[0], bounds[-1]) for name, column in _PAYLOAD.items()}
        spans = [slice(begin - bounds[0], end - bounds[0]) for begin, end in pairwise(bounds)]
        return [
            {
                "turn": turn,
                "phase": PHASES.get(phase, phase),
                "step": step,
                "layer": layer,
                **{name: values[span] for name, values in held.items()},
            }
            for (turn, phase, step, layer), span in zip(self._cells.keys[first:last].iter_rows(), spans, strict=True)
        ]
