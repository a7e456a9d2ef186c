"""The rows of a metrics CSV as a data frame: a file's bytes in, a polars frame out.

For files too long for lists (a session of days, many runs in one) and for whoever wants columns to compute with. What the values
mean, which lines are rows and what -1 is stays with `bmoe_proto.contract.metrics`; only the reading of numbers is polars', and
where it cannot read a stretch of rows as numbers that module reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
from bmoe_proto.contract.columns import METRICS
from bmoe_proto.contract.metrics import NotOursError, parse_metrics, read_layout

from bmoe_collector.common import UserError

if TYPE_CHECKING:
    from bmoe_proto.contract.metrics import Segment

_TYPES = {"int": pl.Int64, "float": pl.Float64}


def metrics_frame(data: bytes, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """One row a token, columns as the file names them, and always `turn`. Raises NotOursError.

    Equal to `parse_metrics(data).columns` with its `turns`. `columns`: read no others (and `turn`); those the file does
    not have are null.
    """
    layout = read_layout(data)
    frames: list[pl.DataFrame] = []
    for names, segments in groupby(layout.segments, key=attrgetter("names")):
        frame = _frame(names, list(segments), columns)
        if frame is None:
            return _careful(data, columns)
        frames.append(frame)
    if not frames:
        return _careful(data, columns)
    whole = pl.concat(frames, how="diagonal") if len(frames) > 1 else frames[0]
    wanted = layout.names if columns is None else columns
    missing = [pl.lit(None, pl.Float64).alias(name) for name in wanted if name not in whole.columns]
    sentinels = [name for name in whole.columns if name in METRICS and METRICS[name].minus_one]
    return whole.with_columns(
        *missing, *(pl.when(pl.col(name) == -1).then(None).otherwise(pl.col(name)).alias(name) for name in sentinels)
    )


def read_metrics(file: str | Path, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """`metrics_frame` of a file.

    Raises:
        UserError: it cannot be read, or is no metrics CSV.
    """
    try:
        return metrics_frame(Path(file).read_bytes(), columns)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    except NotOursError as error:
        raise UserError(f"{file}: is no metrics CSV: {error}") from error


def _frame(names: tuple[str, ...], segments: list[Segment], columns: Sequence[str] | None) -> pl.DataFrame | None:
    """Rows all of whose cells are plain finite numbers, with the right count in every row; else None."""
    if segments[-1].torn or "turn" not in names or not set(names) <= set(METRICS):
        return None
    schema = {name: _TYPES[METRICS[name].type] for name in names}
    if len(schema) != len(names):
        return None
    chosen = list(schema) if columns is None else [name for name in schema if name == "turn" or name in columns]
    try:
        frame = pl.read_csv(
            b"".join(segment.data for segment in segments),
            has_header=False,
            columns=[list(schema).index(name) for name in chosen],
            schema=schema,
            quote_char=None,
            truncate_ragged_lines=False,
        )
    except (pl.exceptions.PolarsError, ValueError):
        return None
    # An empty cell, a row cut short and a word that happens to read as not finite are for the careful reader.
    doubtful = frame.select(
        pl.any_horizontal(
            pl.col(name).null_count() > 0 if kind == pl.Int64 else ~pl.col(name).is_finite().all(ignore_nulls=False)
            for name, kind in frame.schema.items()
        )
    ).item()
    return None if doubtful is not False else frame


def _careful(data: bytes, chosen: Sequence[str] | None) -> pl.DataFrame:
    found = parse_metrics(data)
    rows = len(found)
    names = list(found.names if chosen is None else chosen)
    columns: dict[str, list[Any]] = {name: list(found.columns.get(name) or [None] * rows) for name in names}
    columns["turn"] = list(found.turns)
    return pl.DataFrame(
        [
            pl.Series(name, values, _TYPES[METRICS[name].type] if name in METRICS else None, strict=False)
            for name, values in columns.items()
        ]
    )
