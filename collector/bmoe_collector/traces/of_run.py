"""A stored run's traces: fetched from the artifact store once, read as Parquet from then on.

In: a store, a run by the word a person typed, a kind of trace. Out: an opened trace, or the run's token rows by name. The
Parquet lies in the user's cache directory under the artifact's sha256; it can be deleted at any time and is made again.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from bmoe_collector.common import OutsideError, UserError, open_artifacts
from bmoe_collector.record import SIMULATED, RunRecord
from bmoe_collector.store.engine import Store
from bmoe_collector.store.find import RunNotFoundError
from bmoe_collector.store.load import load_run
from bmoe_collector.traces.keep import keep
from bmoe_collector.traces.read import Trace, open_trace

KINDS = {"route": ("route",), "compute": ("compute", "compute_layers"), "io": ("io",)}


def run_named(store: Store, word: str) -> RunRecord:
    """The run that a person named. Raises UserError for none."""
    try:
        return load_run(store, word)
    except RunNotFoundError as error:
        raise UserError(f"{word}: is no file, and {error}") from error


def run_trace(store: Store, word: str, kind: str) -> Trace:
    """`trace_of` the run that a person named."""
    return trace_of(store, run_named(store, word), kind)


def trace_of(store: Store, record: RunRecord, kind: str) -> Trace:
    """The run's trace of a kind.

    Raises:
        UserError: it has no such trace.
        OutsideError: the artifact is missing or damaged.
    """
    found = next((one for one in record.artifacts if one.kind in KINDS[kind] and one.sha256), None)
    if found is None:
        kinds = ", ".join(sorted({one.kind for one in record.artifacts})) or "none"
        raise UserError(f"run {record.run_id[:12]} has no {kind} trace; its files are: {kinds}")
    from platformdirs import user_cache_path

    from bmoe_collector.store.artifacts import ArtifactError, holder

    parquet = user_cache_path("bmoe-fleet", appauthor=False) / "traces" / f"{found.sha256}.parquet"
    if not parquet.exists():
        try:
            with tempfile.TemporaryDirectory() as folder:
                csv = Path(folder) / "trace.csv"
                with csv.open("wb") as out:
                    for chunk in holder(store, open_artifacts(store), found.sha256).chunks(found.sha256):
                        out.write(chunk)
                keep(csv, parquet)
        except ArtifactError as error:
            raise OutsideError(f"run {record.run_id[:12]}: {error}") from error
    return open_trace(parquet, kind)


def budget_of(record: RunRecord) -> float | None:
    """The expert cache the run had in MiB; None where it had none or nobody tells."""
    from bmoe_collector.meaning.derive import derive

    derived = derive(record)
    size = derived.config.cache_mb if derived.config.cache_mb is not None else derived.cache.budget_mib
    return size or None


def notes_of(record: RunRecord) -> tuple[str, ...]:
    """What a reader must know of the run itself."""
    return (SIMULATED,) if record.run.get("simulated") else ()


def metrics_of(record: RunRecord) -> dict[str, list[Any]]:
    """The run's token rows, by contract name."""
    rows = record.tokens()
    if not len(rows):
        raise UserError(f"run {record.run_id[:12]} has no token rows to join")
    return {name: list(values) for name, values in rows.columns.items()}
