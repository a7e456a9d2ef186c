"""Views of an I/O trace: latency, size and bandwidth, lanes, adjacency (contract, "Decode traces", `--io-trace`).

`read_bytes` is the aligned window actually pulled and what bandwidth is judged against; `req_bytes` is what was wanted, and the
gap is alignment waste. Percentiles are observed values. Latencies are of single reads that overlap across lanes, so
bandwidth of a class is bytes by busy time of its reads, not by wall time.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from bmoe_collector.traces.read import Selection, Trace, View
from bmoe_collector.traces.route import observed


def latency(trace: Trace, chosen: Selection) -> View:
    """Latency percentiles over all reads, by phase and by whether the read was speculative."""
    reads = (
        chosen.of(trace.frame).select("phase", "spec", "proj", "latency_ns", "read_bytes").collect(engine="streaming")
    )
    groups: list[tuple[str, pl.DataFrame]] = [("all", reads)]
    for phase, name in ((0, "prefill"), (1, "decode")):
        groups.append((name, reads.filter(pl.col("phase") == phase)))
    for spec, name in ((0, "demanded"), (1, "speculative")):
        groups.append((name, reads.filter(pl.col("spec") == spec)))
    projections = sorted(value for value in reads["proj"].unique().to_list() if value is not None)
    groups.extend((f"projection {proj}", reads.filter(pl.col("proj") == proj)) for proj in projections)
    rows = [{"reads_of": name, **_latencies(group)} for name, group in groups if group.height]
    return View("latency", _facts(reads), rows, trace.notes())


def _latencies(group: pl.DataFrame) -> dict[str, Any]:
    values = group["latency_ns"]
    return {
        "reads": group.height,
        "mean_us": float(values.mean() or 0) / 1e3,  # type: ignore[arg-type]
        **{f"p{percent}_us": (observed(values, percent / 100) or 0) / 1e3 for percent in (50, 90, 95, 99)},
        "max_us": float(values.max() or 0) / 1e3,  # type: ignore[arg-type]
        "mib_s": _bandwidth(group),
    }


def _bandwidth(group: pl.DataFrame) -> float | None:
    busy_ns = int(group["latency_ns"].sum())
    return int(group["read_bytes"].sum()) / 1048576 / (busy_ns / 1e9) if busy_ns else None


def _facts(reads: pl.DataFrame) -> dict[str, Any]:
    speculative = int((reads["spec"] == 1).sum())
    return {
        "reads": reads.height,
        "read_bytes": int(reads["read_bytes"].sum()),
        "busy_ms": int(reads["latency_ns"].sum()) / 1e6,
        "speculative_share": speculative / reads.height if reads.height else None,
    }


def size(trace: Trace, chosen: Selection) -> View:
    """Reads by the power of two their request fits in: bandwidth and alignment waste of each class."""
    reads = chosen.of(trace.frame).select("req_bytes", "read_bytes", "latency_ns", "spec").collect(engine="streaming")
    fits = pl.col("req_bytes").clip(1).log(2).ceil().cast(pl.Int32)
    rows = []
    for (exponent,), group in reads.with_columns(fits=fits).sort("fits").group_by("fits", maintain_order=True):
        wanted, pulled = int(group["req_bytes"].sum()), int(group["read_bytes"].sum())
        rows.append(
            {
                "up_to_bytes": 1 << int(exponent),
                "reads": group.height,
                "req_bytes": wanted,
                "read_bytes": pulled,
                "waste": (pulled - wanted) / pulled if pulled else None,
                "mib_s": _bandwidth(group),
                "p50_us": (observed(group["latency_ns"], 0.5) or 0) / 1e3,
            }
        )
    wanted, pulled = int(reads["req_bytes"].sum()), int(reads["read_bytes"].sum())
    facts = {**_facts(reads), "req_bytes": wanted, "waste": (pulled - wanted) / pulled if pulled else None}
    return View("size", facts, rows, trace.notes())


def lanes(trace: Trace, chosen: Selection) -> View:
    """What each I/O lane read, its busy time and share of it."""
    reads = chosen.of(trace.frame).select("lane", "read_bytes", "latency_ns", "spec").collect(engine="streaming")
    busy = int(reads["latency_ns"].sum())
    rows = []
    for (lane,), group in reads.sort("lane").group_by("lane", maintain_order=True):
        rows.append(
            {
                "lane": lane,
                "reads": group.height,
                "speculative": int((group["spec"] == 1).sum()),
                "read_bytes": int(group["read_bytes"].sum()),
                "busy_ms": int(group["latency_ns"].sum()) / 1e6,
                "busy_share": int(group["latency_ns"].sum()) / busy if busy else None,
                "mib_s": _bandwidth(group),
            }
        )
    return View("lanes", {**_facts(reads), "lanes": len(rows)}, rows, trace.notes())


def adjacency(trace: Trace, chosen: Selection) -> View:
    """How many reads could have been one: by layer, reads of one decode whose requests touch or overlap in the file.

    Offsets are taken as of one file; a model in shards can make this count a few pairs too many.
    """
    key = ["turn", "phase", "step", "layer"]
    reads = chosen.of(trace.frame).select(*key, "offset", "req_bytes", "read_bytes").sort([*key, "offset"])
    reach = (pl.col("offset") + pl.col("req_bytes")).cum_max().shift(1).over(key)
    table = (
        reads.with_columns(joins=(pl.col("offset") <= reach).fill_null(value=False))
        .group_by("layer")
        .agg(
            pl.len().alias("reads"),
            pl.col("joins").sum().alias("joinable"),
            pl.col("read_bytes").sum(),
        )
        .sort("layer")
        .collect(engine="streaming")
    )
    rows = [
        {**row, "would_be": row["reads"] - row["joinable"], "share": row["joinable"] / row["reads"]}
        for row in table.to_dicts()
    ]
    count, joinable = int(table["reads"].sum() or 0), int(table["joinable"].sum() or 0)
    facts = {
        "reads": count,
        "joinable": joinable,
        "would_be": count - joinable,
        "share": joinable / count if count else None,
    }
    return View("adjacency", facts, rows, trace.notes())
