"""Views of how routings come back: reuse distance, overlap between steps, and the working set.

A step's place is its rank among the distinct (turn, phase, step) of the selection, since steps restart or jump between
turns and the cache does not. Distances are counted in those places; percentiles are observed values. A view goes over the
trace in portions of whole layers, so that what it holds is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from bmoe_collector.traces.arrays import Ints, dense, nearest, nearest_counted, once, packed, starts
from bmoe_collector.traces.read import Selection, Trace, View
from bmoe_collector.traces.route import PHASES

DISTANCES = (1, 2, 4, 8)
PLACE = ("turn", "phase", "step")


@dataclass(frozen=True, slots=True)
class _Routed:
    """The routings of some layers, once per cell and expert, sorted by entry and place.

    An entry is one expert of one layer, numbered in that order; `layers` says which layer each entry is of.
    """

    entry: Ints
    place: Ints
    layers: Ints


def _steps(trace: Trace, chosen: Selection) -> pl.DataFrame:
    """Every step of the selection; the row is its place."""
    return trace.rows(chosen, *PLACE).unique().collect(engine="streaming").sort(PLACE)


def _routed(trace: Trace, chosen: Selection, steps: pl.DataFrame) -> Iterator[_Routed]:
    for portion in trace.portions(chosen, *PLACE, "layer", "expert"):
        known = (np.concatenate((steps[name].to_numpy(), portion[name].to_numpy())) for name in PLACE)
        place = dense(packed(*known))[0][steps.height :]
        layer, layers = dense(portion["layer"].to_numpy())
        expert, experts = dense(portion["expert"].to_numpy())
        entry, pairs = dense(layer * len(experts) + expert)
        key = once(np.sort(entry * steps.height + place))
        entry = key // max(steps.height, 1)
        yield _Routed(entry, key - entry * steps.height, layers[pairs // max(len(experts), 1)])


def reuse(trace: Trace, chosen: Selection) -> View:
    """How many steps lie between two routings of one expert of a layer: by layer, and over all in `facts`.

    `never_reused` counts (layer, expert) pairs routed in one step only.
    """
    steps = _steps(trace, chosen)
    counted = np.zeros(steps.height + 1, np.int64)
    rows: list[dict[str, Any]] = []
    for routed in _routed(trace, chosen, steps):
        begins = starts(routed.entry)
        times = np.diff(begins, append=len(routed.entry))
        within = routed.entry[1:] == routed.entry[:-1]
        distances = np.diff(routed.place)[within]
        layers = routed.layers[routed.entry[1:][within]]
        counted += np.bincount(distances, minlength=len(counted))
        for layer in once(routed.layers).tolist():
            low, high = np.searchsorted(layers, (layer, layer + 1))
            spread = np.sort(distances[low:high])
            experts = times[routed.layers == layer]
            rows.append(
                {
                    "layer": layer,
                    "reuses": len(spread),
                    "p50": nearest(spread, 0.5),
                    "p90": nearest(spread, 0.9),
                    "max": int(spread[-1]) if len(spread) else None,
                    "experts": len(experts),
                    "never_reused": int((experts == 1).sum()),
                }
            )
    facts = {
        "reuses": int(counted.sum()),
        "p50": nearest_counted(counted, 0.5),
        "p90": nearest_counted(counted, 0.9),
        "max": int(np.flatnonzero(counted)[-1]) if counted.any() else None,
        "pairs": sum(row["experts"] for row in rows),
        "never_reused": sum(row["never_reused"] for row in rows),
    }
    return View("reuse", facts, rows, trace.notes())


def overlap(trace: Trace, chosen: Selection) -> View:
    """Mean share of a cell's experts that the same layer routed 1, 2, 4 and 8 steps before, by layer and over all.

    Only cells of one turn and phase are compared, and only where the earlier cell exists.
    """
    rows: list[dict[str, Any]] = []
    shares = dict.fromkeys(DISTANCES, 0.0)
    pairs = dict.fromkeys(DISTANCES, 0)
    for portion in trace.portions(chosen, *PLACE, "layer", "expert"):
        layer, layers = dense(portion["layer"].to_numpy())
        series, kinds = dense(packed(portion["turn"].to_numpy(), portion["phase"].to_numpy()))
        step = packed(portion["step"].to_numpy())
        room = int(step.max(initial=0)) + 1 + max(DISTANCES)  # no step before the first is one of another series
        cell, cells = dense((layer * len(kinds) + series) * room + step)
        expert, _ = dense(portion["expert"].to_numpy())
        # 64 experts a word: (word, cell) pairs in order, and which bits of each are set
        routed = once(np.sort((expert // 64 * len(cells) + cell) * 64 + expert % 64))
        begins = starts(routed // 64)
        pair = routed[begins] // 64
        bits = np.add.reduceat(np.left_shift(np.uint64(1), (routed % 64).astype(np.uint64)), begins)
        cell = pair % max(len(cells), 1)
        width = np.bincount(cell, weights=np.bitwise_count(bits), minlength=len(cells))
        layer_of = cells // room // max(len(kinds), 1)
        found: list[dict[str, Any]] = [{"layer": value} for value in layers.tolist()]
        for distance in DISTANCES:
            before = np.searchsorted(cells, cells - distance)
            exists = cells[before] == cells - distance
            earlier = pair + before[cell] - cell
            at = np.minimum(np.searchsorted(pair, earlier), len(pair) - 1)
            both = np.where(exists[cell] & (pair[at] == earlier), bits & bits[at], 0)
            common = np.bincount(cell, weights=np.bitwise_count(both), minlength=len(cells))
            share = common[exists] / width[exists]
            count = np.bincount(layer_of[exists], minlength=len(layers))
            total = np.bincount(layer_of[exists], weights=share, minlength=len(layers))
            for row, many, summed in zip(found, count.tolist(), total.tolist(), strict=True):
                row[f"shared_{distance}"] = summed / many if many else None
            shares[distance] += float(share.sum())
            pairs[distance] += len(share)
        rows += found
    facts: dict[str, Any] = {}
    for distance in DISTANCES:
        facts[f"shared_{distance}"] = shares[distance] / pairs[distance] if pairs[distance] else None
        facts[f"pairs_{distance}"] = pairs[distance]
    return View("overlap", facts, rows, trace.notes())


def workset(trace: Trace, chosen: Selection) -> View:
    """The experts touched so far after each step, and their bytes: one row a step.

    Bytes come from the file's `# layer=` lines, else from the largest read seen of that layer; None where neither is known.
    """
    steps = _steps(trace, chosen)
    new = np.zeros(steps.height, np.int64)
    size = np.zeros(steps.height, np.int64)
    unknown = np.zeros(steps.height, np.int64)
    for routed in _routed(trace, chosen, steps):
        first = routed.place[starts(routed.entry)]
        sizes = layer_bytes(trace, once(routed.layers).tolist())
        each = [sizes[layer] for layer in routed.layers.tolist()]
        np.add.at(new, first, 1)
        np.add.at(size, first, [one or 0 for one in each])
        np.add.at(unknown, first, [one is None for one in each])
    experts, touched = np.cumsum(new).tolist(), np.cumsum(size).tolist()
    rows = [
        {
            "turn": turn,
            "phase": PHASES.get(phase, phase),
            "step": step,
            "new": added,
            "experts": so_far,
            "bytes": None if missing else total,
        }
        for (turn, phase, step), added, so_far, total, missing in zip(
            steps.iter_rows(), new.tolist(), experts, touched, np.cumsum(unknown).tolist(), strict=True
        )
    ]
    last = rows[-1] if rows else {"experts": 0, "bytes": 0}
    return View(
        "workset", {"steps": len(rows), "experts": last["experts"], "bytes": last["bytes"]}, rows, trace.notes()
    )


def layer_bytes(trace: Trace, layers: Iterable[int]) -> dict[int, int | None]:
    """Bytes of one expert by layer: as the file states them, else the largest read of that layer, else None."""
    stated = {layer: facts.expert_bytes for layer, facts in trace.layers.items() if facts.expert_bytes}
    found: dict[int, int | None] = {layer: stated.get(layer) for layer in layers}
    if None in found.values():
        seen = (
            trace.rows(Selection(), "layer", "expert_bytes")
            .group_by("layer")
            .agg(pl.col("expert_bytes").max())
            .collect(engine="streaming")
        )
        largest = dict(seen.iter_rows())
        found = {layer: size or largest.get(layer) or None for layer, size in found.items()}
    return found
