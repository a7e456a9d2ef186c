"""The files of runs: what is stored of each against the engine's own copy of it.

In: the database's rows, the folder of the artifact store, what engines left of their files by run. Out: problems. Every
object that the database names is read, whole, without the product's reader.

What may differ: the copy of an engine that was killed may lack its very last write; a phone whose disk was full may hold less
than the copy, from its beginning on; an engine that was ended before it opened a file has left none, and then the run says that
it was not written.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

LAST_WRITE = 1 << 16
STREAMS = {"stdout", "stderr"}


@dataclass(frozen=True, slots=True)
class Written:
    """What one engine wrote, by its own copies: stdout, and each file by name."""

    stdout: bytes
    files: Mapping[str, bytes]


def read(folder: Path, sha256: str) -> bytes:
    """An object of the artifact store. Raises OSError where there is none, ZstdError where it is damaged."""
    packed = (folder / sha256[:2] / f"{sha256}.zst").read_bytes()
    return zstandard.ZstdDecompressor().decompressobj().decompress(packed)


def not_written(rows: list[dict[str, Any]], written: Written | None) -> set[str]:
    """Reasons for which a run may be called incomplete though all was kept: files that its engine never opened."""
    return {
        f"artifact {row['name']} cannot be had: {row['problem']}"
        for row in rows
        if _never_was(row, written.files if written is not None else {})
    }


def by_run(rows: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Rows of `artifacts` by run_no."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found[row["run_no"]].append(row)
    return found


def check(
    run: Mapping[str, Any],
    rows: list[dict[str, Any]],
    folder: Path,
    written: Written | None,
    csv_rows: int,
    *,
    lossy: bool,
    full: bool,
) -> list[str]:
    """One run's files. `lossy`: its phone may have lost some; `full`: of a disk that had no room; `csv_rows`: as stored."""
    copies = written.files if written is not None else {}
    problems = []
    named = {row["name"] for row in rows}
    if run["ended"] and not lossy:
        problems += [f"file {name} was written and is not named" for name in copies if name not in named]
    for row in rows:
        name = f"file {row['name']}"
        if row["state"] == "given_up" and (_never_was(row, copies) or (row["problem"] and lossy)):
            continue
        if row["state"] != "stored":
            problems.append(f"{name} is {row['state']} {row['problem'] or ''}")
            continue
        try:
            data = read(folder, row["sha256"])
        except (OSError, zstandard.ZstdError) as error:
            problems.append(f"{name} is called stored and cannot be read: {error}")
            continue
        if len(data) != row["size"] or hashlib.sha256(data).hexdigest() != row["sha256"]:
            problems.append(f"{name} holds {len(data)} bytes that are not those of its name")
        if row["name"] not in STREAMS:
            said = not run["complete"] or run["outcome"] != "ok"
            problems += [f"{name} {each}" for each in _against(run, data, copies.get(row["name"]), full=full and said)]
        if row["kind"] == "metrics":
            lines = _rows(data)
            if csv_rows != lines and not (full and abs(csv_rows - lines) <= 1):
                problems.append(f"{name} has {lines} rows, {csv_rows} are stored")
    return problems


def _never_was(row: Mapping[str, Any], copies: Mapping[str, bytes]) -> bool:
    return row["state"] == "given_up" and row["problem"] == "was not written" and row["name"] not in copies


def _against(run: Mapping[str, Any], data: bytes, copy: bytes | None, *, full: bool) -> list[str]:
    if data == (copy or b""):
        return []
    copy = copy or b""
    killed = run["signal"] is not None or not run["exit_observed"]
    if killed and data.startswith(copy) and len(data) - len(copy) <= LAST_WRITE:
        return []
    if full and copy.startswith(data):
        return []
    return [f"has {len(data)} bytes, the engine wrote {len(copy)}, and they are not the same"]


def _rows(data: bytes) -> int:
    """Whole rows of a metrics CSV: neither a comment nor the header."""
    whole = data[: data.rfind(b"\n") + 1].splitlines()
    return sum(1 for line in whole if line and not line.startswith((b"#", b"step,")))
