"""Frames to one file: CSV, JSON (one array), JSON lines or Parquet, by the file's suffix.

In: frames of one schema, piece by piece. Out: the file, whole or not at all: it is written beside its place and renamed.
CSV text is safe to open in a spreadsheet (a cell that would be a formula gets an apostrophe), and control characters
other than tab and line feed are U+FFFD in it; JSON is strict ASCII. Parquet is zstd-compressed and never in memory whole.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from bmoe_collector.common import OutsideError, UserError, plain

SUFFIXES = (".csv", ".json", ".jsonl", ".ndjson", ".parquet")


def check_suffix(path: Path) -> str:
    """The file's suffix; raises UserError for one that names no format."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"--to {path}: the format is the file's suffix: {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--to {path}: there is no folder {path.absolute().parent}")
    return suffix


def write_frames(frames: Iterable[pl.DataFrame], path: Path) -> int:
    """Write pieces as one file; returns the number of rows."""
    suffix = check_suffix(path)
    with _whole(path) as place:
        if suffix == ".parquet":
            return _parquet(frames, place)
        with place.open("w", encoding="utf-8" if suffix == ".csv" else "ascii", newline="") as out:
            rows = 0
            for at, frame in enumerate(frames):
                rows += frame.height
                if suffix == ".csv":
                    out.write(safe_csv(frame).write_csv(include_header=at == 0))
                    continue
                texts = (
                    json.dumps(plain(row), ensure_ascii=True, allow_nan=False) for row in frame.iter_rows(named=True)
                )
                if suffix == ".json":
                    first = rows == frame.height
                    out.writelines(("[" if first and not n else ",\n") + text for n, text in enumerate(texts))
                else:
                    out.writelines(text + "\n" for text in texts)
            if suffix == ".json":
                out.write("]\n" if rows else "[]\n")
    return rows


def write_lazy(frame: pl.LazyFrame, path: Path) -> int:
    """Write a lazy frame, larger than memory if it must be; returns the number of rows."""
    suffix = check_suffix(path)
    if suffix in {".csv", ".parquet"}:
        with _whole(path) as place:
            if suffix == ".csv":
                safe_csv(frame).sink_csv(place)
            else:
                frame.sink_parquet(place, compression="zstd")
        return int(frame.select(pl.len()).collect(engine="streaming").item())
    return write_frames(_slices(frame), path)


def _slices(frame: pl.LazyFrame, size: int = 200_000) -> Iterator[pl.DataFrame]:
    at = 0
    while (piece := frame.slice(at, size).collect(engine="streaming")).height:
        yield piece
        at += size


def _parquet(frames: Iterable[pl.DataFrame], place: Path) -> int:
    """Pieces are written one by one and then streamed into one file."""
    folder = place.with_name(place.name + ".pieces")
    folder.mkdir()
    rows = 0
    try:
        pieces = []
        for at, frame in enumerate(frames):
            pieces.append(folder / f"{at:06}.parquet")
            frame.write_parquet(pieces[-1], compression="lz4")
            rows += frame.height
        pl.scan_parquet(pieces).sink_parquet(place, compression="zstd")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return rows


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A place beside the file; it becomes the file when the block ends well, and is gone when it does not."""
    place = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield place
        with place.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(place, path)
    except OSError as error:
        raise OutsideError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        place.unlink(missing_ok=True)


def safe_csv(frame: Any) -> Any:
    """A frame, lazy or not, with lists joined, booleans 1 and 0, and no text that a spreadsheet or terminal acts on."""
    made = []
    for name, kind in frame.collect_schema().items():
        column = pl.col(name)
        if isinstance(kind, pl.List):
            made.append(_harmless(column.cast(pl.List(pl.String)).list.join(" ")).alias(name))
        elif kind == pl.String:
            made.append(_harmless(column).alias(name))
        elif kind == pl.Boolean:
            made.append(column.cast(pl.Int8))
    return frame.with_columns(made)


def _harmless(column: pl.Expr) -> pl.Expr:
    quiet = column.str.replace_all(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u{200e}\u{200f}\u{202a}-\u{202e}\u{2066}-\u{2069}]", "\ufffd"
    )
    formula = column.str.contains(r"^[=+\-@\t\r\n|＝＋－＠]")
    return pl.when(formula).then(pl.lit("'") + quiet).otherwise(quiet)
