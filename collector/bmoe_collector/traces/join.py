"""The time of each token beside what was traced of it.

A trace's `step` is a position in the context, the metrics rows count from 1 in each turn. They meet at the first decode
step a turn has in the trace, which is the prompt length only where nothing was kept from an earlier turn
(generations.md: in a continued chat it is the context before the turn's first token).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from bmoe_collector.traces.read import Selection, Trace, View

METRICS = ("wall_ms", "io_ms", "stall_ms", "compute_ms", "mgmt_ms", "read_bytes", "cache_hit_pct", "majflt")

_ROUTE = (
    pl.len().alias("routed"),
    (pl.col("residency") == 0).sum().alias("faced_cold"),
    (pl.col("residency") == 2).sum().alias("prefetched"),
    (pl.col("dropped").fill_null(0) == 1).sum().alias("dropped"),
    pl.col("expert_bytes").sum().alias("traced_bytes"),
)
_COMPUTE = (
    pl.len().alias("nodes"),
    (pl.col("wall_ns").sum() / 1e6).alias("traced_ms"),
    pl.col("majflt").sum().alias("traced_majflt"),
)
_IO = (
    pl.len().alias("reads"),
    (pl.col("spec") == 1).sum().alias("speculative"),
    pl.col("read_bytes").sum().alias("traced_bytes"),
    (pl.col("latency_ns").sum() / 1e6).alias("busy_ms"),
)


def with_metrics(trace: Trace, chosen: Selection, rows: Mapping[str, Sequence[Any]]) -> View:
    """One row a traced decode step: what was traced, and the metrics row of the same token.

    `rows` are the run's metrics columns by contract name, with `turn` and `step`. A traced step without a metrics row keeps
    None there; metrics rows without a traced step are counted in the facts.
    """
    sums = {"route": _ROUTE, "compute": _COMPUTE, "io": _IO}[trace.kind]
    decode = trace.frame.filter(pl.col("phase") == 1)
    first = decode.group_by("turn").agg(pl.col("step").min().alias("first"))
    steps = (
        chosen.of(decode)
        .group_by("turn", "step")
        .agg(*sums)
        .join(first, on="turn")
        .with_columns(pl.col("turn", "step").cast(pl.Int64), token=pl.col("step").cast(pl.Int64) - pl.col("first") + 1)
        .sort("turn", "step")
        .drop("first")
        .collect(engine="streaming")
    )
    names = [name for name in METRICS if name in rows]
    metrics = pl.DataFrame(
        {
            "turn": list(rows.get("turn", ())),
            "token": list(rows.get("step", ())),
            **{name: list(rows[name]) for name in names},
        },
        schema_overrides={"turn": pl.Int64, "token": pl.Int64},
        strict=False,
    ).with_columns(pl.col("turn").fill_null(0))
    renamed = {name: f"metrics_{name}" for name in names if name in steps.columns}
    joined = steps.join(metrics.rename(renamed).unique(["turn", "token"]), on=["turn", "token"], how="left").sort(
        "turn", "step"
    )
    key = renamed.get(names[0], names[0]) if names else None
    unmatched = int(joined[key].is_null().sum()) if key else joined.height
    lone = metrics.join(steps, on=["turn", "token"], how="anti").height
    facts = {"steps": joined.height, "steps_without_metrics": unmatched, "metrics_without_steps": lone}
    return View("with-metrics", facts, joined.to_dicts(), trace.notes())
