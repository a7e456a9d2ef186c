"""Views of a compute trace: by op, by layer or segment, and major faults attributed (contract, "Decode traces").

A per-node trace has a barrier after every graph node and a per-layer trace one at every layer: read shares, not absolutes.
`op` and `name` are the graph's own; `part` is this module's guess at what a node belongs to, by its name.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from bmoe_collector.traces.read import Selection, Trace, View
from bmoe_collector.traces.route import PHASES

_OPS: tuple[tuple[str, str], ...] = (
    (r"^LAYER$", "segment"),
    (r"(?i)^MUL_MAT_ID$", "experts"),
)
_NAMES: tuple[tuple[str, str], ...] = (
    (r"(?i)ffn_moe|_exps?\b|expert", "experts"),
    (r"(?i)ffn", "dense ffn"),
    (r"(?i)^(q|k|v)cur|^kq|kqv|attn|cache_[kv]|rope", "attention"),
    (r"(?i)result_output|lm_head", "output head"),
    (r"(?i)embd|inp_", "embedding"),
    (r"(?i)norm", "norm"),
)
_SUMS = (pl.len().alias("nodes"), pl.col("wall_ns").sum(), pl.col("majflt").sum())


def ops(trace: Trace, chosen: Selection) -> View:
    """Time and faults by op and part, most time first. A layer trace has one op, `LAYER`."""
    table = (
        _by_part(_rows(trace, chosen), "op", "name")
        .group_by("op", "part")
        .agg(pl.col("nodes", "wall_ns", "majflt").sum())
        .sort(["wall_ns", "op", "part"], descending=[True, False, False])
    )
    return View("ops", _facts(trace, chosen, table), _shares(table), _notes(trace))


def layers(trace: Trace, chosen: Selection) -> View:
    """Time and faults by layer, or by segment for a per-layer trace (`pre`, `blk.<il>`, `post`)."""
    rows_read = _rows(trace, chosen)
    segment = "name" if trace.layer_granularity else "layer"
    keys = dict.fromkeys((segment, "layer"))
    table = (
        rows_read.group_by(*keys, "turn", "phase", "step")
        .agg(*_SUMS)
        .collect(engine="streaming")
        .with_columns(segment=pl.col(segment).cast(pl.String))
        .group_by("segment")
        .agg(
            pl.col("layer").min(),
            pl.col("nodes").sum().alias("rows"),
            pl.struct("turn", "phase", "step").n_unique().alias("decodes"),
            pl.col("wall_ns", "majflt").sum(),
        )
        .with_columns(
            rank=pl.when(pl.col("segment") == "pre")
            .then(-1)
            .when(pl.col("segment") == "post")
            .then(1 << 30)
            .otherwise("layer")
        )
        .sort("rank", "segment")
        .drop("rank")
    )
    rows = [{**row, "wall_ms_per_decode": row["wall_ns"] / 1e6 / row["decodes"]} for row in _shares(table)]
    return View("layers", _facts(trace, chosen, table), rows, _notes(trace))


def faults(trace: Trace, chosen: Selection) -> View:
    """Where major faults were served: by layer and op, most faults first, with the time of the nodes that faulted."""
    table = (
        _by_part(_rows(trace, chosen).filter(pl.col("majflt") > 0), "layer", "op", "name")
        .group_by("layer", "op", "part")
        .agg(pl.col("nodes", "wall_ns", "majflt").sum())
        .sort(["majflt", "layer", "op", "part"], descending=[True, False, False, False])
    )
    everything = _rows(trace, chosen).select(pl.col("majflt", "wall_ns").sum()).collect(engine="streaming")
    total_faults, total_ns = (int(value or 0) for value in everything.row(0))
    rows = [
        {
            **row,
            "fault_share": row["majflt"] / total_faults if total_faults else None,
            "share": row["wall_ns"] / total_ns if total_ns else None,
        }
        for row in table.to_dicts()
    ]
    in_faulting = sum(row["wall_ns"] for row in rows)
    facts = {
        **_facts(trace, chosen, table),
        "majflt": total_faults,
        "wall_ns": total_ns,
        "wall_share_of_faulting_nodes": in_faulting / total_ns if total_ns else None,
    }
    return View("faults", facts, rows, _notes(trace))


def _rows(trace: Trace, chosen: Selection) -> pl.LazyFrame:
    return trace.rows(chosen, "turn", "phase", "step", "layer", "op", "name", "wall_ns", "majflt")


def _by_part(frame: pl.LazyFrame, *keys: str) -> pl.DataFrame:
    """Sums by names as they are, a few thousand, and the part of each: patterns are not tried on every row."""
    return frame.group_by(keys).agg(*_SUMS).collect(engine="streaming").with_columns(part=_part())


def _part() -> pl.Expr:
    guesses = [(pl.col("op").str.contains(pattern), part) for pattern, part in _OPS]
    guesses += [(pl.col("name").str.contains(pattern), part) for pattern, part in _NAMES]
    expression = pl.lit("other")
    for matches, part in reversed(guesses):
        expression = pl.when(matches).then(pl.lit(part)).otherwise(expression)
    return expression


def _shares(table: pl.DataFrame) -> list[dict[str, Any]]:
    total = int(table["wall_ns"].sum() or 0)
    faulted = int(table["majflt"].sum() or 0)
    return [
        {
            **row,
            "wall_ms": row["wall_ns"] / 1e6,
            "share": row["wall_ns"] / total if total else None,
            "fault_share": row["majflt"] / faulted if faulted else None,
        }
        for row in table.to_dicts()
    ]


def _facts(trace: Trace, chosen: Selection, table: pl.DataFrame) -> dict[str, Any]:
    decodes = _rows(trace, chosen).select("turn", "phase", "step").unique().collect(engine="streaming")
    phases = decodes["phase"].unique().sort().to_list()
    return {
        "granularity": "layer" if trace.layer_granularity else "node",
        "decodes": decodes.height,
        "wall_ns": int(table["wall_ns"].sum() or 0),
        "majflt": int(table["majflt"].sum() or 0),
        "phases": [PHASES.get(phase, str(phase)) for phase in phases],
    }


def _notes(trace: Trace) -> tuple[str, ...]:
    barrier = "layer" if trace.layer_granularity else "graph node"
    return (*trace.notes(), f"a barrier at every {barrier} inflates the total: read shares, not absolutes")
