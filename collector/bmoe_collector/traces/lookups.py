"""What the engine looked up in its cache: routings in, one lookup for each expert of a layer and batch out.

A trace has a row a routing. In decode each is a lookup. In prefill the many tokens of one batch may route the same expert;
the streamer looks it up and reads it once, while every row keeps the residency it faced (contract, "Route trace"), so counting
rows over-counts misses against `cache_hit_pct`. Counted like this a whole trace gives the engine's own rate. A dropped routing
was never looked up.

The file's order is the engine's: a batch goes through the layers one after the other, so a batch of prefill ends where the layer
falls. Of a single layer's rows that cannot be seen, and all of a turn's prefill is then one batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from bmoe_collector.traces.arrays import packed
from bmoe_collector.traces.read import Selection, Trace


@dataclass(frozen=True, slots=True)
class Lookups:
    """Equally long arrays in the order the engine asked; `served`: the expert was resident."""

    layer: npt.NDArray[Any]
    expert: npt.NDArray[Any]
    served: npt.NDArray[np.bool_]
    routings: int  # rows behind them

    def __len__(self) -> int:
        return len(self.layer)


def lookups(trace: Trace, chosen: Selection) -> Lookups:
    """The lookups of the selected rows."""
    rows = trace.rows(chosen, "turn", "phase", "layer", "expert", "residency", "dropped")
    kept = rows.filter(pl.col("dropped").fill_null(0) != 1).collect(engine="streaming")
    phase, layer, expert = (kept[name].to_numpy() for name in ("phase", "layer", "expert"))
    served = kept["residency"].fill_null(0).to_numpy() > 0
    prefill = np.flatnonzero(phase == 0)
    if len(prefill):
        batch = np.cumsum(_begins(kept["turn"].to_numpy()[prefill], layer[prefill]), dtype=np.int64)
        _, first = np.unique(packed(batch, layer[prefill], expert[prefill]), return_index=True)
        taken = phase != 0
        taken[prefill[first]] = True
        layer, expert, served = layer[taken], expert[taken], served[taken]
    return Lookups(layer, expert, served, kept.height)


def _begins(turn: npt.NDArray[Any], layer: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Where a batch of prefill begins."""
    begins = np.zeros(len(turn), bool)
    begins[1:] = (turn[1:] != turn[:-1]) | (layer[1:] < layer[:-1])
    return begins
