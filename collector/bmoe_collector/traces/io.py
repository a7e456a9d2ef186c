"""Views of an I/O trace: latency, size and bandwidth, lanes, adjacency (contract, "Decode traces", `--io-trace`).

`read_bytes` is the aligned window actually pulled and what bandwidth is judged against; `req_bytes` is what was wanted, and the
gap is alignment waste. Percentiles are observed values. Latencies are of single reads that overlap across lanes, so
bandwidth of a class is bytes by busy time of its reads, not by wall time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from bmoe_collector.traces.arrays import Ints, dense, nearest, packed, starts
from bmoe_collector.traces.cells import CELL
from bmoe_collector.traces.read import Selection, Trace, View

_READ = ("read_bytes", "latency_ns")
_NO_LAYER = -(1 << 31)


def latency(trace: Trace, chosen: Selection) -> View:
    """Latency percentiles over all reads, by phase and by whether the read was speculative."""
    reads = trace.rows(chosen, "phase", "spec", "proj", *_READ).collect(engine="streaming")
    taken, pulled = _numbers(reads, "latency_ns"), _numbers(reads, "read_bytes")
    rows = []
    for name, mine in _kinds(reads):
        some = taken if mine is None else taken[mine]
        if len(some):
            ordered = np.sort(some)
            rows.append(
                {
                    "reads_of": name,
                    "reads": len(some),
                    "mean_us": int(some.sum()) / len(some) / 1e3,
                    **{f"p{percent}_us": (nearest(ordered, percent / 100) or 0) / 1e3 for percent in (50, 90, 95, 99)},
                    "max_us": int(ordered[-1]) / 1e3,
                    "mib_s": _bandwidth(pulled if mine is None else pulled[mine], some),
                }
            )
    return View("latency", _facts(reads), rows, trace.notes())


def _kinds(reads: pl.DataFrame) -> Iterator[tuple[str, npt.NDArray[np.bool_] | None]]:
    yield "all", None
    for column, value, name in (
        ("phase", 0, "prefill"),
        ("phase", 1, "decode"),
        ("spec", 0, "demanded"),
        ("spec", 1, "speculative"),
    ):
        yield name, _equal(reads[column], value)
    for proj in reads["proj"].unique().drop_nulls().sort().to_list():
        yield f"projection {proj}", _equal(reads["proj"], proj)


def _equal(values: pl.Series, value: int) -> npt.NDArray[np.bool_]:
    return (values == value).fill_null(value=False).to_numpy()


def _numbers(reads: pl.DataFrame, name: str) -> Ints:
    return reads[name].fill_null(0).to_numpy()


def _bandwidth(pulled: Ints, taken: Ints) -> float | None:
    busy_ns = int(taken.sum())
    return int(pulled.sum()) / 1048576 / (busy_ns / 1e9) if busy_ns else None


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
    reads = trace.rows(chosen, "req_bytes", "spec", *_READ).collect(engine="streaming")
    asked, pulled, taken = (_numbers(reads, name) for name in ("req_bytes", "read_bytes", "latency_ns"))
    fits = np.frexp(np.maximum(asked, 1) - 1)[1]  # the bits that one byte fewer takes
    rows = []
    for exponent in dense(fits)[1].tolist():
        mine = fits == exponent
        rows.append(
            {
                "up_to_bytes": 1 << exponent,
                "reads": int(mine.sum()),
                **_waste(asked[mine], pulled[mine]),
                "mib_s": _bandwidth(pulled[mine], taken[mine]),
                "p50_us": (nearest(np.sort(taken[mine]), 0.5) or 0) / 1e3,
            }
        )
    whole = _waste(asked, pulled)
    return View(
        "size", {**_facts(reads), "req_bytes": whole["req_bytes"], "waste": whole["waste"]}, rows, trace.notes()
    )


def _waste(asked: Ints, pulled: Ints) -> dict[str, Any]:
    wanted, got = int(asked.sum()), int(pulled.sum())
    return {"req_bytes": wanted, "read_bytes": got, "waste": (got - wanted) / got if got else None}


def lanes(trace: Trace, chosen: Selection) -> View:
    """What each I/O lane read, its busy time and share of it."""
    table = (
        trace.rows(chosen, "lane", "spec", *_READ)
        .group_by("lane")
        .agg(
            pl.len().alias("reads"),
            (pl.col("spec") == 1).sum().alias("speculative"),
            pl.col("read_bytes").sum(),
            pl.col("latency_ns").sum(),
        )
        .sort("lane")
        .collect(engine="streaming")
    )
    busy = int(table["latency_ns"].sum())
    rows = [
        {
            **{name: row[name] for name in ("lane", "reads", "speculative", "read_bytes")},
            "busy_ms": row["latency_ns"] / 1e6,
            "busy_share": row["latency_ns"] / busy if busy else None,
            "mib_s": row["read_bytes"] / 1048576 / (row["latency_ns"] / 1e9) if row["latency_ns"] else None,
        }
        for row in table.to_dicts()
    ]
    count = int(table["reads"].sum())
    facts = {
        "reads": count,
        "read_bytes": int(table["read_bytes"].sum()),
        "busy_ms": busy / 1e6,
        "speculative_share": int(table["speculative"].sum()) / count if count else None,
        "lanes": len(rows),
    }
    return View("lanes", facts, rows, trace.notes())


def adjacency(trace: Trace, chosen: Selection) -> View:
    """How many reads could have been one: by layer, reads of one decode whose requests touch or overlap in the file.

    Offsets are taken as of one file; a model in shards can make this count a few pairs too many.
    """
    rows: list[dict[str, Any]] = []
    for portion in trace.portions(chosen, *CELL, "offset", "req_bytes", "read_bytes"):
        layer, layers = dense(portion["layer"].fill_null(_NO_LAYER).to_numpy())
        placed = (portion["offset"] + portion["req_bytes"]).is_not_null().to_numpy()
        joins = np.zeros(portion.height, bool)
        joins[placed] = _joins(portion.filter(placed), layer[placed])
        counts = [
            np.bincount(layer, minlength=len(layers)),
            np.bincount(layer[joins], minlength=len(layers)),
        ]
        pulled = np.zeros(len(layers), np.int64)
        np.add.at(pulled, layer, _numbers(portion, "read_bytes"))
        for value, reads, joined, got in zip(
            layers.tolist(), *(each.tolist() for each in (*counts, pulled)), strict=True
        ):
            rows.append(
                {
                    "layer": None if value == _NO_LAYER else value,
                    "reads": reads,
                    "joinable": joined,
                    "read_bytes": got,
                    "would_be": reads - joined,
                    "share": joined / reads,
                }
            )
    count, joinable = sum(row["reads"] for row in rows), sum(row["joinable"] for row in rows)
    facts = {
        "reads": count,
        "joinable": joinable,
        "would_be": count - joinable,
        "share": joinable / count if count else None,
    }
    return View("adjacency", facts, rows, trace.notes())


def _joins(reads: pl.DataFrame, layer: Ints) -> npt.NDArray[np.bool_]:
    """Which reads begin within, or right after, what an earlier offset of the same decode and layer asked for."""
    decode = packed(*(reads[name].to_numpy() for name in ("turn", "phase", "step")), layer)
    offset = reads["offset"].to_numpy()
    order = np.argsort(packed(decode, offset), kind="stable")
    end = (offset + reads["req_bytes"].to_numpy())[order]
    offset, decode = offset[order], decode[order]
    group = np.zeros(len(order), np.int64)
    group[starts(decode)[1:]] = 1
    group = np.cumsum(group)
    begins_at, ends_at = np.split(packed(np.tile(group, 2), np.concatenate((offset, end))), 2)
    reach = np.maximum.accumulate(ends_at)  # of a later group it is larger whatever the ends
    joins = np.zeros(len(order), bool)
    joins[order[1:]] = (group[1:] == group[:-1]) & (begins_at[1:] <= reach[:-1])
    return joins
