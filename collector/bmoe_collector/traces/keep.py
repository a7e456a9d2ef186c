"""Traces kept as Parquet: made once from a CSV, read in its place from then on.

The file holds the trace's columns, compressed with zstd, and in its key-value metadata `bmoe_trace` one JSON object with the
kind, the preamble's facts, the layers and what was torn or malformed, so nothing a view needs is only in the CSV.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import polars as pl

from bmoe_collector.common import UserError
from bmoe_collector.traces.read import LayerFacts, Trace, open_trace

_KEY = "bmoe_trace"
_ROW_BYTES = 48


def keep(csv: Path, parquet: Path) -> Path:
    """Write `parquet` from `csv` unless it is there; returns it. A half-written file is never left under that name."""
    if parquet.exists():
        return parquet
    trace = open_trace(csv)
    parquet.parent.mkdir(parents=True, exist_ok=True)
    told = {
        "kind": trace.kind,
        "facts": dict(trace.facts),
        "layers": {str(layer): [facts.expert_bytes, facts.dense_bytes] for layer, facts in trace.layers.items()},
        "torn": trace.torn,
        "malformed": trace.malformed,
        "absent": list(trace.absent),
    }
    half = parquet.with_name(f".{parquet.name}.{os.getpid()}")
    try:
        trace.frame.sink_parquet(half, compression="zstd", metadata={_KEY: json.dumps(told)})
        os.replace(half, parquet)
    finally:
        half.unlink(missing_ok=True)
    return parquet


def open_kept(parquet: Path) -> Trace:
    """Open what `keep` wrote.

    Raises:
        UserError: it is another Parquet file, a damaged one, or none.
    """
    try:
        told = json.loads(pl.read_parquet_metadata(parquet)[_KEY])
        layers = {int(layer): LayerFacts(*pair) for layer, pair in told["layers"].items()}
        raw = pl.scan_parquet(parquet)
        rows = int(raw.select(pl.len()).collect().item())
        return Trace(
            told["kind"],
            str(parquet),
            told["facts"],
            layers,
            raw,
            rows * _ROW_BYTES,
            left_out=int(told["malformed"]),
            torn=told["torn"],
            absent=tuple(told["absent"]),
        )
    except (pl.exceptions.PolarsError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{parquet}: is no trace kept as Parquet, or a damaged one: {error}") from None
