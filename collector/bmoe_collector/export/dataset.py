"""A partitioned Parquet dataset of the store, behind any fsspec URL, for DuckDB, Spark and the like.

In: a store and a URL. Out: files as README.md says, a schema, and a manifest that makes the next export incremental:
only files of runs that changed are written again. A local file is written beside its place and renamed; an object store
makes a name visible when its upload has ended. The manifest is written last, so an export that was interrupted is
taken up by the next one. A run is exported as it was when its rows were read.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import polars as pl
from sqlalchemy import func, select

from bmoe_collector.common import OutsideError, UserError
from bmoe_collector.query.frames import view_frame, view_schema
from bmoe_collector.store.engine import Store
from bmoe_collector.store.schema import ARTIFACTS, HOST_SAMPLES, RUNS
from bmoe_collector.store.views import views

FORMAT = 1
MANIFEST, SCHEMA = "_manifest.json", "_schema.json"
BY_PARTITION: Mapping[str, str] = {"runs": "v_runs", "verdicts": "v_verdicts", "labels": "v_labels"}
BY_RUN: Mapping[str, str] = {
    "turns": "v_turns", "tokens": "v_tokens", "samples": "v_samples", "residency": "v_residency",
}  # fmt: skip
TRACES = ("route", "compute", "io")
_SAVE_EVERY = 500


@dataclass(slots=True)
class Exported:
    """What an export did."""

    dataset: str
    runs: int = 0
    written: int = 0  # files
    unchanged: int = 0  # runs
    removed: int = 0  # files
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Run:
    """What decides where a run lies and whether its files are still right."""

    run_no: int
    run_id: str
    partition: str
    state: str
    ended: bool


def export_dataset(store: Store, url: str, *, traces: bool = False) -> Exported:
    """Bring a dataset up to date with the store.

    Raises:
        UserError: the place holds another store's dataset, or one of a later version.
        OutsideError: it cannot be written.
    """
    place = _Place(url)
    try:
        return _export(store, place, traces=traces)
    except OSError as error:
        raise OutsideError(f"--dataset {url}: {error.strerror or error}") from error


def _export(store: Store, place: _Place, *, traces: bool) -> Exported:
    told = _manifest(place, store)
    known: dict[str, Any] = told["runs"]
    done = Exported(place.url)
    current = _runs(store)
    done.runs = len(current)
    place.write(SCHEMA, json.dumps(schema_document(), indent=1, ensure_ascii=False).encode())
    changed = 0
    for run in current:
        before = known.get(run.run_id)
        if before and run.ended and before["state"] == run.state and (before["traces"] or not traces):
            done.unchanged += 1
            continue
        files = _write_run(store, place, run, traces=traces or bool(before and before["traces"]), done=done)
        for old in set(before["files"] if before else ()) - set(files):
            done.removed += place.remove(old)
        known[run.run_id] = {"state": run.state, "traces": traces or bool(before and before["traces"]), "files": files}
        changed += 1
        if changed % _SAVE_EVERY == 0:
            place.save(told)
    for gone in set(known) - {run.run_id for run in current}:
        for old in known.pop(gone)["files"]:
            done.removed += place.remove(old)
    _write_partitions(store, place, current, told["partitions"], done)
    place.save(told)
    return done


def _manifest(place: _Place, store: Store) -> dict[str, Any]:
    text = place.read(MANIFEST)
    if text is None:
        return {"format": FORMAT, "store_id": store.store_id, "runs": {}, "partitions": {}}
    try:
        told: dict[str, Any] = json.loads(text)
        ours = told["format"] == FORMAT and isinstance(told["runs"], dict) and isinstance(told["partitions"], dict)
        owner = told["store_id"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--dataset {place.url}: {MANIFEST} cannot be read ({error}): export to an empty place"
        ) from None
    if not ours:
        raise UserError(f"--dataset {place.url}: is of another version ({told['format']}): export to an empty place")
    if owner != store.store_id:
        raise UserError(f"--dataset {place.url}: is the dataset of store {owner}, this is {store.store_id}")
    return told


def _runs(store: Store) -> list[_Run]:
    host = (
        select(HOST_SAMPLES.c.run_no, func.count().label("n"), func.max(HOST_SAMPLES.c.sample_no).label("last"))
        .group_by(HOST_SAMPLES.c.run_no)
        .subquery()
    )
    columns = ("run_no", "run_id", "agent_uuid", "started_wall_ns", "changed_wall_ns", "n_tokens", "n_turns", "ended")
    query = (
        select(*(RUNS.c[name] for name in columns), host.c.n, host.c.last)
        .outerjoin(host, host.c.run_no == RUNS.c.run_no)
        .order_by(RUNS.c.run_no)
    )
    with store.read() as connection:
        rows = connection.execute(query).all()
    return [
        _Run(
            row.run_no,
            row.run_id,
            partition_of(row.agent_uuid, row.started_wall_ns),
            f"{row.changed_wall_ns}.{row.n_tokens}.{row.n_turns}.{row.n or 0}.{row.last or 0}.{row.run_no}."
            f"{partition_of(row.agent_uuid, row.started_wall_ns)}",
            bool(row.ended),
        )
        for row in rows
    ]


def partition_of(agent_uuid: str | None, started_wall_ns: int | None) -> str:
    """`device=…/month=…` of a run."""
    month = "unknown"
    if started_wall_ns is not None:
        month = datetime.fromtimestamp(started_wall_ns // 10**9, UTC).strftime("%Y-%m")
    return f"device={f'phone-{agent_uuid}' if agent_uuid else 'imported'}/month={month}"


def _write_run(store: Store, place: _Place, run: _Run, *, traces: bool, done: Exported) -> list[str]:
    files = []
    for table, view in BY_RUN.items():
        frame = view_frame(store, view, [run.run_no])
        if frame.height:
            files.append(f"{table}/{run.partition}/{run.run_id}.parquet")
            place.write(files[-1], _parquet(frame))
            done.written += 1
    if traces:
        files += _write_traces(store, place, run, done)
    return files


def _write_traces(store: Store, place: _Place, run: _Run, done: Exported) -> list[str]:
    from bmoe_collector.traces.of_run import KINDS, run_trace
    from bmoe_collector.traces.read import COLUMNS

    with store.read() as connection:
        held = set(
            connection.execute(
                select(ARTIFACTS.c.kind).where(ARTIFACTS.c.run_no == run.run_no, ARTIFACTS.c.state == "stored")
            ).scalars()
        )
    files = []
    for kind in TRACES:
        if not held & set(KINDS[kind]):
            continue
        try:
            trace = run_trace(store, run.run_id, kind)
            frame = trace.frame.select(
                pl.lit(run.run_id).alias("run_id"), *(pl.col(name).cast(to) for name, to in COLUMNS[kind].items())
            )
            with TemporaryDirectory() as folder:
                piece = Path(folder) / "trace.parquet"
                frame.sink_parquet(piece, compression="zstd")
                files.append(f"trace_{kind}/{run.partition}/{run.run_id}.parquet")
                place.put(files[-1], piece)
                done.written += 1
        except (UserError, OutsideError) as error:
            done.problems.append(f"{run.run_id[:12]}: {error}")
    return files


def _write_partitions(
    store: Store, place: _Place, current: Sequence[_Run], known: dict[str, Any], done: Exported
) -> None:
    """One file a partition for tables with a row or a few a run; written when its content differs."""
    partitions: dict[str, list[int]] = {}
    for run in current:
        partitions.setdefault(run.partition, []).append(run.run_no)
    alive = set()
    for table, view in BY_PARTITION.items():
        for partition, numbers in partitions.items():
            name = f"{table}/{partition}/{table}.parquet"
            frame = view_frame(store, view, numbers)
            if not frame.height:
                continue
            alive.add(name)
            digest = _digest(frame)
            if known.get(name) == digest:
                continue
            place.write(name, _parquet(frame))
            known[name] = digest
            done.written += 1
    for gone in set(known) - alive:
        done.removed += place.remove(gone)
        del known[gone]


def _parquet(frame: pl.DataFrame) -> bytes:
    out = io.BytesIO()
    frame.write_parquet(out, compression="zstd")
    return out.getvalue()


def _digest(frame: pl.DataFrame) -> str:
    out = io.BytesIO()
    frame.rechunk().write_ipc(out)
    return hashlib.sha256(out.getvalue()).hexdigest()


def schema_document() -> dict[str, Any]:
    """Tables, their columns, types, units and meaning."""
    from bmoe_proto.contract import columns as contract

    from bmoe_collector.traces.read import COLUMNS

    tables: dict[str, Any] = {}
    for table, name in {**BY_PARTITION, **BY_RUN}.items():
        view = views()[name]
        types = view_schema(view)
        tables[table] = {
            "meaning": view.doc,
            "file": "one a partition" if table in BY_PARTITION else "one a run",
            "columns": [{**asdict(column), "kind": str(types[column.name])} for column in view.columns],
        }
    told = {"route": contract.ROUTE, "compute": contract.COMPUTE, "io": contract.IO}
    for kind in TRACES:
        tables[f"trace_{kind}"] = {
            "meaning": f"Rows of the {kind} trace, with --traces.",
            "file": "one a run",
            "columns": [
                {"name": "run_id", "kind": "String", "unit": "", "doc": "32 hex digits"},
                *(
                    {"name": name, "kind": str(to), "unit": told[kind][name].unit, "doc": told[kind][name].doc}
                    for name, to in COLUMNS[kind].items()
                ),
            ],
        }
    partitions = {"device": "phone-<agent uuid>, or imported", "month": "YYYY-MM of the start in UTC, or unknown"}
    return {"format": FORMAT, "partitions": partitions, "tables": tables}


class _Place:
    """The dataset's folder or prefix."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._fs, root = fsspec.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UserError(f"--dataset {url}: {error}") from error
        self._root = root.rstrip("/")
        kinds = self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)
        self._local = "file" in kinds

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def read(self, name: str) -> bytes | None:
        """A file's bytes, None when it is not there."""
        try:
            return bytes(self._fs.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Put a file in its place, whole."""
        path = self._path(name)
        if not self._local:
            self._fs.pipe_file(path, data)
            return
        with _beside(path) as half:
            Path(half).write_bytes(data)

    def put(self, name: str, local: Path) -> None:
        """Put a local file in its place, whole."""
        path = self._path(name)
        if not self._local:
            self._fs.put_file(str(local), path)
            return
        import shutil

        with _beside(path) as half:
            shutil.copyfile(local, half)

    def remove(self, name: str) -> int:
        """Take a file away; 1 when it was there."""
        try:
            self._fs.rm_file(self._path(name))
        except FileNotFoundError:
            return 0
        return 1

    def save(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest, after what it speaks of is on disk."""
        if self._local and hasattr(os, "sync"):
            os.sync()
        self.write(MANIFEST, json.dumps(manifest, separators=(",", ":")).encode())


@contextmanager
def _beside(path: str) -> Iterator[str]:
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    half = os.path.join(folder, f".{name}.{secrets.token_hex(4)}")
    try:
        yield half
        os.replace(half, path)
    finally:
        if os.path.exists(half):
            os.unlink(half)
