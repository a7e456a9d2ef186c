"""Views of how routings come back: reuse distance, overlap between steps, and the working set.

A step's place is its rank among the distinct (turn, phase, step) of the selection, since steps restart or jump between
turns and the cache does not. Distances are counted in those places; percentiles are observed values.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from bmoe_collector.traces.read import Selection, Trace, View
from bmoe_collector.traces.route import observed

DISTANCES = (1, 2, 4, 8)
PLACE = ("turn", "phase", "step")


def _placed(trace: Trace, chosen: Selection) -> pl.LazyFrame:
    """Routings once per cell and expert, with `place`."""
    frame = chosen.of(trace.frame).select(*PLACE, "layer", "expert").unique()
    places = (
        frame.select(PLACE).unique().sort(PLACE).with_row_index("place").with_columns(pl.col("place").cast(pl.Int64))
    )
    return frame.join(places, on=PLACE)


def reuse(trace: Trace, chosen: Selection) -> View:
    """How many steps lie between two routings of one expert of a layer: by layer, and over all in `facts`.

    `never_reused` counts (layer, expert) pairs routed in one step only.
    """
    placed = _placed(trace, chosen).sort("layer", "expert", "place").collect(engine="streaming")
    gaps = placed.with_columns(pl.col("place").diff().over("layer", "expert").alias("distance"))
    single = placed.group_by("layer", "expert").len().filter(pl.col("len") == 1).group_by("layer").len("never_reused")
    pairs = placed.group_by("layer").agg(pl.col("expert").n_unique().alias("experts"))
    never = dict(single.iter_rows())
    experts = dict(pairs.iter_rows())
    rows = []
    for layer in sorted(experts):
        distances = gaps.filter((pl.col("layer") == layer) & pl.col("distance").is_not_null())["distance"]
        rows.append(
            {"layer": layer, **_spread(distances), "experts": experts[layer], "never_reused": never.get(layer, 0)}
        )
    everything = gaps.filter(pl.col("distance").is_not_null())["distance"]
    facts = {**_spread(everything), "pairs": sum(experts.values()), "never_reused": sum(never.values())}
    return View("reuse", facts, rows, trace.notes())


def _spread(distances: pl.Series) -> dict[str, Any]:
    return {
        "reuses": distances.len(),
        "p50": observed(distances, 0.5),
        "p90": observed(distances, 0.9),
        "max": distances.max() if distances.len() else None,
    }


def overlap(trace: Trace, chosen: Selection) -> View:
    """Mean share of a cell's experts that the same layer routed 1, 2, 4 and 8 steps before, by layer and over all.

    Only cells of one turn and phase are compared, and only where the earlier cell exists.
    """
    cells = (
        chosen.of(trace.frame)
        .group_by("turn", "phase", "step", "layer")
        .agg(pl.col("expert").unique())
        .sort("turn", "phase", "layer", "step")
        .collect(engine="streaming")
    )
    by_layer: dict[int, dict[str, Any]] = {
        layer: {"layer": layer} for layer in sorted(cells["layer"].unique().to_list())
    }
    facts: dict[str, Any] = {}
    for distance in DISTANCES:
        earlier = cells.with_columns(pl.col("step") + distance).rename({"expert": "before"})
        pairs = cells.join(earlier, on=["turn", "phase", "step", "layer"]).with_columns(
            share=pl.col("expert").list.set_intersection("before").list.len() / pl.col("expert").list.len()
        )
        means = dict(pairs.group_by("layer").agg(pl.col("share").mean()).iter_rows())
        for layer, row in by_layer.items():
            row[f"shared_{distance}"] = means.get(layer)
        facts[f"shared_{distance}"] = pairs["share"].mean() if pairs.height else None
        facts[f"pairs_{distance}"] = pairs.height
    return View("overlap", facts, list(by_layer.values()), trace.notes())


def workset(trace: Trace, chosen: Selection) -> View:
    """The experts touched so far after each step, and their bytes: one row a step.

    Bytes come from the file's `# layer=` lines, else from the largest read seen of that layer; None where neither is known.
    """
    placed = _placed(trace, chosen)
    first = placed.group_by("layer", "expert").agg(pl.col("place").min())
    sizes = layer_bytes(trace)
    table = pl.LazyFrame(
        {"layer": list(sizes), "size": list(sizes.values())}, schema={"layer": pl.Int32, "size": pl.Int64}
    )
    new = (
        first.join(table, on="layer", how="left")
        .group_by("place")
        .agg(
            pl.len().alias("new"),
            pl.col("size").sum().alias("new_bytes"),
            pl.col("size").is_null().sum().alias("unknown"),
        )
    )
    steps = placed.select(*PLACE, "place").unique()
    done = (
        steps.join(new, on="place", how="left")
        .sort("place")
        .with_columns(pl.col("new", "new_bytes", "unknown").fill_null(0))
        .with_columns(
            experts=pl.col("new").cum_sum(), bytes=pl.col("new_bytes").cum_sum(), unknown=pl.col("unknown").cum_sum()
        )
        .collect(engine="streaming")
    )
    rows = [
        {
            "turn": row["turn"],
            "phase": {0: "prefill", 1: "decode"}.get(row["phase"], row["phase"]),
            "step": row["step"],
            "new": row["new"],
            "experts": row["experts"],
            "bytes": None if row["unknown"] else row["bytes"],
        }
        for row in done.iter_rows(named=True)
    ]
    last = rows[-1] if rows else {"experts": 0, "bytes": 0}
    return View(
        "workset", {"steps": len(rows), "experts": last["experts"], "bytes": last["bytes"]}, rows, trace.notes()
    )


def layer_bytes(trace: Trace) -> dict[int, int | None]:
    """Bytes of one expert by layer: as the file states them, else the largest read of that layer, else None."""
    known: dict[int, int | None] = {
        layer: facts.expert_bytes for layer, facts in trace.layers.items() if facts.expert_bytes
    }
    seen = trace.frame.group_by("layer").agg(pl.col("expert_bytes").max()).collect(engine="streaming")
    for layer, largest in seen.iter_rows():
        if layer not in known:
            known[layer] = largest or None
    return known
