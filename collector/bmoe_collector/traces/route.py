"""Views of a route trace: sanity, matrix, hot, cache, entropy and bytes (contract, "Route trace").

A cell is the rows sharing (turn, phase, step, layer), one for each routed expert. `residency` is per routing, `expert_bytes`
per read: summing bytes is right in every phase, counting misses over-counts reads in prefill. A dropped routing kept
its weight and its residency and was never read. A `nan` weight is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import polars as pl

from bmoe_collector.traces.arrays import dense, nearest, packed, starts
from bmoe_collector.traces.cells import CELL, Cells
from bmoe_collector.traces.read import Selection, Trace, View

PHASES = {0: "prefill", 1: "decode"}
_SIZE = pl.col("expert_bytes").fill_null(0)
_DROPPED = pl.col("dropped").fill_null(0) == 1
_RESIDENCY = pl.col("residency")
_PROMISES = {
    "read_bytes": _SIZE,
    "unknown_weights": pl.col("weight").is_null(),
    "dropped": _DROPPED,
    "unknown_residency": ~_RESIDENCY.is_in([0, 1, 2]).fill_null(value=True),
    "bytes_without_miss": (_RESIDENCY.fill_null(0) != 0) & (_SIZE > 0),
    "bytes_of_dropped": _DROPPED & (_SIZE > 0),
}


def sanity(trace: Trace, chosen: Selection) -> View:
    """Does the file keep the format's promises; facts about the whole, one row for each turn and phase."""
    pieces, duplicates = [], 0
    for portion in trace.portions(chosen, *CELL, "slot", **_PROMISES):
        found = Cells(portion)
        pieces.append(
            found.keys.with_columns(
                pl.Series("slots", found.widths),
                *(pl.Series(name, found.sums(found.column(name))) for name in _PROMISES),
            )
        )
        key = np.sort(packed(np.repeat(np.arange(len(found)), found.widths), found.column("slot")))
        duplicates += int((np.diff(starts(key), append=len(key)) > 1).sum())
    cells = pl.concat(pieces)
    last_layer = pl.col("layer") == pl.col("layer").max()
    rows = (
        cells.group_by("turn", "phase")
        .agg(
            pl.col("slots").sum().alias("routings"),
            pl.col("step").n_unique().alias("steps"),
            pl.col("step").min().alias("first_step"),
            pl.col("step").max().alias("last_step"),
            pl.col("layer").n_unique().alias("layers"),
            pl.col("step").filter(last_layer).n_unique().alias("last_layer_steps"),
            pl.col("read_bytes", "unknown_weights", "dropped").sum(),
        )
        .sort("turn", "phase")
    )
    width = trace.fact("n_expert_used")
    widths = {int(slots): int(count) for slots, count in cells.group_by("slots").len().sort("slots").iter_rows()}
    odd = sum(count for slots, count in widths.items() if width is not None and slots != width)
    layer_steps = cells.group_by("turn", "phase", "layer").len("steps")
    uneven = layer_steps.group_by("turn", "phase").agg(pl.col("steps").n_unique().alias("kinds"))
    notes = list(trace.notes())
    if any(phase == 0 for phase in rows["phase"].to_list()) and uneven.filter(pl.col("kinds") > 1).height:
        notes.append(
            "in prefill the last MoE layer routes one token only: the graph gathers the tokens whose logits were asked for"
        )
    facts = {
        "routings": int(cells["slots"].sum()),
        "unattributed": int(cells.filter(pl.col("step") < 0)["slots"].sum()),
        **{name: int(cells[name].sum()) for name in ("unknown_residency", "bytes_without_miss", "bytes_of_dropped")},
        "duplicates": duplicates,
        "n_expert_used": width,
        "cells": cells.height,
        "cells_of_another_width": odd if width is not None else None,
        "widths": {str(slots): count for slots, count in widths.items()},
        "malformed": trace.malformed,
        "torn": trace.torn is not None,
        "model": trace.facts.get("model"),
        "arch": trace.facts.get("arch"),
    }
    return View("sanity", facts, [_named_phase(row) for row in rows.to_dicts()], tuple(notes))


def hot(trace: Trace, chosen: Selection) -> View:
    """Concentration by layer: how many experts take half, 80 % and 90 % of the routings, and how much the top ones cover.

    `cover_<n>` is the share of the layer's routings that go to its n most routed experts.
    """
    counts = _expert_counts(trace.rows(chosen, "layer", "expert")).rename({"len": "routings"})
    counts = counts.sort(["layer", "routings", "expert"], descending=[False, True, False])
    n_expert = trace.fact("n_expert")
    rows = []
    for (layer,), group in counts.group_by("layer", maintain_order=True):
        taken = group["routings"].to_list()
        total = sum(taken)
        row = {
            "layer": layer,
            "routings": total,
            "experts": len(taken),
            "of": n_expert,
            "top_expert": group["expert"][0],
            "top_share": taken[0] / total,
        }
        for percent in (50, 80, 90):
            row[f"experts_for_{percent}"] = _covering(taken, total * percent / 100)
        for count in (1, 4, 16, 64):
            row[f"cover_{count}"] = sum(taken[:count]) / total
        row["hottest"] = [
            {"expert": e, "routings": n} for e, n in group.head(8).select("expert", "routings").iter_rows()
        ]
        rows.append(row)
    return View("hot", {"layers": len(rows), "routings": sum(row["routings"] for row in rows)}, rows, trace.notes())


def _expert_counts(frame: pl.LazyFrame) -> pl.DataFrame:
    return frame.group_by("layer", "expert").len().collect(engine="streaming")


def _covering(taken: list[int], enough: float) -> int:
    so_far = 0
    for count, routings in enumerate(taken, 1):
        so_far += routings
        if so_far >= enough:
            return count
    return len(taken)


def cache(trace: Trace, chosen: Selection) -> View:
    """Misses, hits and first touches of prefetched experts by turn, phase and layer.

    `hit_rate` is over routings that were looked up: a dropped one never was, so it leaves both sides of the ratio as it
    leaves the engine's `cache_hit_pct`; `hit_rate_of_routed` counts it as the miss it faced.
    """
    table = (
        trace.rows(chosen, "turn", "phase", "layer", "residency", "expert_bytes", "dropped")
        .group_by("turn", "phase", "layer")
        .agg(
            pl.len().alias("routed"),
            ((pl.col("residency") == 0) & ~_DROPPED).sum().alias("miss"),
            (pl.col("residency") == 1).sum().alias("hit"),
            (pl.col("residency") == 2).sum().alias("prefetched"),
            _DROPPED.sum().alias("dropped"),
            (pl.col("expert_bytes") > 0).sum().alias("reads"),
            pl.col("expert_bytes").sum().alias("read_bytes"),
        )
        .sort("turn", "phase", "layer")
        .collect(engine="streaming")
    )
    rows = [_named_phase(_rates(row)) for row in table.to_dicts()]
    facts = {}
    for phase, name in PHASES.items():
        part = table.filter(pl.col("phase") == phase)
        if part.height:
            summed = part.select(pl.col("routed", "miss", "hit", "prefetched", "dropped", "reads", "read_bytes").sum())
            facts[name] = _rates(summed.to_dicts()[0])
    return View("cache", facts, rows, trace.notes())


def _rates(row: dict[str, int]) -> dict[str, float | int | None]:
    served = row["hit"] + row["prefetched"]
    looked_up = served + row["miss"]
    return {
        **row,
        "hit_rate": served / looked_up if looked_up else None,
        "hit_rate_of_routed": served / row["routed"] if row["routed"] else None,
    }


def entropy(trace: Trace, chosen: Selection) -> View:
    """How spread the routing is, by layer: of the experts used over the run, and of the weights inside a cell, in bits.

    `usage_bits` is the entropy of the layer's expert counts, at most log2 of the number of experts. `weight_bits` and
    `top1_share` are means over cells whose every weight is known, weights normalised within the cell.
    """
    counts = _expert_counts(trace.rows(chosen, *CELL, "expert", "weight")).sort("layer", "expert")
    share = pl.col("len") / pl.col("len").sum()
    usage = counts.group_by("layer", maintain_order=True).agg(
        (-(share * share.log(2)).sum()).alias("usage_bits"), pl.len().alias("experts")
    )
    means = pl.concat(_weights(Cells(portion)) for portion in trace.portions(chosen, *CELL, "weight"))
    n_expert = trace.fact("n_expert")
    table = usage.join(means, on="layer").sort("layer")
    rows = [{**row, "usage_bits": abs(row["usage_bits"])} for row in table.to_dicts()]
    return View("entropy", {"most_bits": math.log2(n_expert) if n_expert else None}, rows, trace.notes())


def _weights(cells: Cells) -> pl.DataFrame:
    """Means by layer over the cells whose weights are known and have a sum S > 0.

    With it the entropy of a cell, -sum(w/S log(w/S)), is (log(S) sum(w) - sum(w log(w))) / S.
    """
    weight = cells.column("weight")
    total = cells.sums(weight)
    layer, layers = dense(cells.keys["layer"].to_numpy())
    known = np.isfinite(total) & (total > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        positive = weight > 0
        logs = cells.sums(np.where(positive, weight * np.log2(weight), 0.0))
        bits = (np.log2(total) * cells.sums(np.where(positive, weight, 0.0)) - logs) / total
        top = cells.most(weight) / total
    count = np.bincount(layer[known], minlength=len(layers))

    def mean(values: npt.NDArray[np.float64]) -> pl.Series:
        sums = np.bincount(layer[known], weights=values[known], minlength=len(layers))
        return pl.Series(
            [one / many if many else None for one, many in zip(sums.tolist(), count.tolist(), strict=True)],
            dtype=pl.Float64,
        )

    return pl.DataFrame(
        {
            "layer": pl.Series(layers, dtype=pl.Int32),
            "weight_bits": mean(np.maximum(bits, 0.0)),
            "top1_share": mean(top),
            "cells_known": count,
            "cells": np.bincount(layer, minlength=len(layers)),
        }
    )


def bytes_read(trace: Trace, chosen: Selection) -> View:
    """Flash bytes by layer, with the dense bytes a cold layer costs once; facts have the bytes of a step by phase."""
    cells = (
        trace.rows(chosen, *CELL, "expert_bytes")
        .group_by(CELL)
        .agg(pl.col("expert_bytes").sum().alias("bytes"), (pl.col("expert_bytes") > 0).sum().alias("reads"))
        .collect(engine="streaming")
    )
    per_layer = (
        cells.group_by("layer")
        .agg(
            pl.col("bytes").sum().alias("read_bytes"),
            pl.col("bytes").filter(pl.col("phase") == 0).sum().alias("prefill_bytes"),
            pl.col("bytes").filter(pl.col("phase") == 1).sum().alias("decode_bytes"),
            pl.col("reads").sum(),
        )
        .sort("layer")
    )
    steps = cells.group_by("turn", "phase", "step").agg(pl.col("bytes").sum())
    rows = []
    for row in per_layer.iter_rows(named=True):
        known = trace.layers.get(row["layer"])
        rows.append(
            {
                **row,
                "expert_bytes": known.expert_bytes if known else None,
                "dense_bytes": known.dense_bytes if known else None,
            }
        )
    dense = [layer.dense_bytes for layer in trace.layers.values() if layer.dense_bytes is not None]
    facts: dict[str, object] = {
        "read_bytes": sum(row["read_bytes"] for row in rows),
        "dense_bytes": sum(dense) if dense else None,
    }
    for phase, name in PHASES.items():
        taken = np.sort(steps.filter(pl.col("phase") == phase)["bytes"].to_numpy())
        if len(taken):
            facts[name] = {
                "steps": len(taken),
                "mean": int(taken.sum()) / len(taken),
                "p50": nearest(taken, 0.5),
                "p95": nearest(taken, 0.95),
                "max": int(taken[-1]),
            }
    return View("bytes", facts, rows, trace.notes())


def _named_phase(row: Mapping[str, object]) -> dict[str, object]:
    phase = row["phase"]
    return {**row, "phase": PHASES.get(phase, phase) if isinstance(phase, int) else phase}
