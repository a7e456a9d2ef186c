"""Views of a route trace: sanity, matrix, hot, cache, entropy and bytes (contract, "Route trace").

A cell is the rows sharing (turn, phase, step, layer), one for each routed expert. `residency` is per routing, `expert_bytes`
per read: summing bytes is right in every phase, counting misses over-counts reads in prefill. A dropped routing kept
its weight and its residency and was never read. A `nan` weight is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import polars as pl

from bmoe_collector.traces.read import Selection, Trace, View

CELL = ("turn", "phase", "step", "layer")
PHASES = {0: "prefill", 1: "decode"}


def sanity(trace: Trace, chosen: Selection) -> View:
    """Does the file keep the format's promises; facts about the whole, one row for each turn and phase."""
    frame = chosen.of(trace.frame)
    width = trace.fact("n_expert_used")
    cells = frame.group_by(CELL).agg(pl.len().alias("slots"))
    per_step = frame.group_by("turn", "phase", "layer").agg(pl.col("step").n_unique().alias("steps"))
    last_layer = pl.col("layer") == pl.col("layer").max()
    rows = (
        frame.group_by("turn", "phase")
        .agg(
            pl.len().alias("routings"),
            pl.col("step").n_unique().alias("steps"),
            pl.col("step").min().alias("first_step"),
            pl.col("step").max().alias("last_step"),
            pl.col("layer").n_unique().alias("layers"),
            pl.col("step").filter(last_layer).n_unique().alias("last_layer_steps"),
            pl.col("expert_bytes").sum().alias("read_bytes"),
            pl.col("weight").is_null().sum().alias("unknown_weights"),
            (pl.col("dropped") == 1).sum().alias("dropped"),
        )
        .sort("turn", "phase")
        .collect(engine="streaming")
    )
    key = [*CELL, "slot"]
    whole = frame.select(
        pl.len().alias("routings"),
        (pl.col("step") < 0).sum().alias("unattributed"),
        (~pl.col("residency").is_in([0, 1, 2])).sum().alias("unknown_residency"),
        ((pl.col("residency") != 0) & (pl.col("expert_bytes") > 0)).sum().alias("bytes_without_miss"),
        ((pl.col("dropped") == 1) & (pl.col("expert_bytes") > 0)).sum().alias("bytes_of_dropped"),
    ).collect(engine="streaming")
    duplicates = frame.group_by(key).len().filter(pl.col("len") > 1).select(pl.len()).collect(engine="streaming").item()
    widths = cells.group_by("slots").len().sort("slots").collect(engine="streaming")
    found = {int(slots): int(count) for slots, count in widths.iter_rows()}
    odd = sum(count for slots, count in found.items() if width is not None and slots != width)
    uneven = (
        per_step.group_by("turn", "phase").agg(pl.col("steps").n_unique().alias("kinds")).collect(engine="streaming")
    )
    notes = list(trace.notes())
    if any(phase == 0 for phase in rows["phase"].to_list()) and uneven.filter(pl.col("kinds") > 1).height:
        notes.append(
            "in prefill the last MoE layer routes one token only: the graph gathers the tokens whose logits were asked for"
        )
    facts = {
        **{name: _plain(value) for name, value in zip(whole.columns, whole.row(0), strict=True)},
        "duplicates": int(duplicates),
        "n_expert_used": width,
        "cells": sum(found.values()),
        "cells_of_another_width": odd if width is not None else None,
        "widths": {str(slots): count for slots, count in found.items()},
        "malformed": trace.malformed,
        "torn": trace.torn is not None,
        "model": trace.facts.get("model"),
        "arch": trace.facts.get("arch"),
    }
    return View("sanity", facts, [_named_phase(row) for row in rows.to_dicts()], tuple(notes))


def matrix(trace: Trace, chosen: Selection) -> View:
    """Which experts each cell routed: one row a cell, experts in the router's order."""
    cells = (
        chosen.of(trace.frame)
        .sort([*CELL, "slot"])
        .group_by(CELL, maintain_order=True)
        .agg("expert", "weight", "residency", "dropped")
        .collect(engine="streaming")
    )
    rows = [
        {
            "turn": row["turn"],
            "phase": PHASES.get(row["phase"], row["phase"]),
            "step": row["step"],
            "layer": row["layer"],
            "experts": row["expert"],
            "weights": row["weight"],
            "residency": row["residency"],
            "dropped": row["dropped"],
        }
        for row in cells.iter_rows(named=True)
    ]
    return View("matrix", {"cells": len(rows)}, rows, trace.notes())


def hot(trace: Trace, chosen: Selection) -> View:
    """Concentration by layer: how many experts take half, 80 % and 90 % of the routings, and how much the top ones cover.

    `cover_<n>` is the share of the layer's routings that go to its n most routed experts.
    """
    counts = (
        chosen.of(trace.frame).group_by("layer", "expert").agg(pl.len().alias("routings")).collect(engine="streaming")
    ).sort(["layer", "routings", "expert"], descending=[False, True, False])
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
    dropped = pl.col("dropped").fill_null(0) == 1
    table = (
        chosen.of(trace.frame)
        .group_by("turn", "phase", "layer")
        .agg(
            pl.len().alias("routed"),
            ((pl.col("residency") == 0) & ~dropped).sum().alias("miss"),
            (pl.col("residency") == 1).sum().alias("hit"),
            (pl.col("residency") == 2).sum().alias("prefetched"),
            dropped.sum().alias("dropped"),
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
    frame = chosen.of(trace.frame)
    counts = frame.group_by("layer", "expert").len().collect(engine="streaming").sort("layer", "expert")
    share = pl.col("len") / pl.col("len").sum()
    usage = counts.group_by("layer", maintain_order=True).agg(
        (-(share * share.log(2)).sum()).alias("usage_bits"), pl.len().alias("experts")
    )
    part = pl.col("weight") / pl.col("weight").sum()
    bits = pl.when(part > 0).then(-part * part.log(2)).otherwise(0.0).sum()
    known = pl.col("weight").is_not_null().all() & (pl.col("weight").sum() > 0)
    cells = frame.group_by(CELL).agg(known.alias("known"), bits.alias("bits"), part.max().alias("top1"))
    means = (
        cells.collect(engine="streaming")
        .sort(CELL)  # one order of adding, so that the same trace gives the same digits
        .group_by("layer", maintain_order=True)
        .agg(
            pl.col("bits").filter(pl.col("known")).mean().alias("weight_bits"),
            pl.col("top1").filter(pl.col("known")).mean().alias("top1_share"),
            pl.col("known").sum().alias("cells_known"),
            pl.len().alias("cells"),
        )
    )
    n_expert = trace.fact("n_expert")
    table = usage.join(means, on="layer").sort("layer")
    rows = [{**row, "usage_bits": abs(row["usage_bits"])} for row in table.to_dicts()]
    return View("entropy", {"most_bits": math.log2(n_expert) if n_expert else None}, rows, trace.notes())


def bytes_read(trace: Trace, chosen: Selection) -> View:
    """Flash bytes by layer, with the dense bytes a cold layer costs once; facts have the bytes of a step by phase."""
    frame = chosen.of(trace.frame)
    per_layer = (
        frame.group_by("layer")
        .agg(
            pl.col("expert_bytes").sum().alias("read_bytes"),
            pl.col("expert_bytes").filter(pl.col("phase") == 0).sum().alias("prefill_bytes"),
            pl.col("expert_bytes").filter(pl.col("phase") == 1).sum().alias("decode_bytes"),
            (pl.col("expert_bytes") > 0).sum().alias("reads"),
        )
        .sort("layer")
        .collect(engine="streaming")
    )
    steps = (
        frame.group_by("turn", "phase", "step")
        .agg(pl.col("expert_bytes").sum().alias("bytes"))
        .collect(engine="streaming")
    )
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
        taken = steps.filter(pl.col("phase") == phase)["bytes"]
        if taken.len():
            facts[name] = {
                "steps": taken.len(),
                "mean": taken.mean(),
                "p50": observed(taken, 0.5),
                "p95": observed(taken, 0.95),
                "max": taken.max(),
            }
    return View("bytes", facts, rows, trace.notes())


def observed(values: pl.Series, quantile: float) -> int | float | None:
    """The nearest-rank percentile: a value that was seen, never one between two."""
    if not values.len():
        return None
    rank = max(1, math.ceil(quantile * values.len()))
    found: int | float = values.sort()[rank - 1]
    return found


def _named_phase(row: Mapping[str, object]) -> dict[str, object]:
    phase = row["phase"]
    return {**row, "phase": PHASES.get(phase, phase) if isinstance(phase, int) else phase}


def _plain(value: object) -> int:
    return int(value) if isinstance(value, int) else 0
