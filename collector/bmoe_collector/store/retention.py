"""Keeping a store sound and small: what is wrong with it, and what may go.

In: an open store and its artifacts. Out: lists of findings; with `vacuum`, files removed and tables compacted. Nothing
is ever removed that is not somewhere else too: an object that no row names (it was stored for an import that never
committed, and is older than a day), or a file of a complete run that has been copied to an archive and read back there.
Runs that are still being received, or lack a file, are not touched; nor are raw blocks and rows, ever.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from sqlalchemy import func, select, text, update

from bmoe_collector.store import migrate
from bmoe_collector.store.artifacts import MOVED, ArtifactError, Artifacts
from bmoe_collector.store.engine import Store
from bmoe_collector.store.schema import (
    ARTIFACTS,
    BLOCKS,
    CURSORS,
    LOOSE_FILES,
    RUNS,
    TOKENS_CSV,
    TOKENS_STDOUT,
    UNCHECKED,
)

GRACE_S = 86_400.0
DAY_NS = 86_400 * 1_000_000_000
KEEP_HERE = ("stdout", "stderr", "metrics", "run.json", "sidecar")
"""Kinds whose bytes rows are made from: they stay, so that a run can be made again at any time."""


@dataclass(slots=True)
class Report:
    """What a check or a vacuum found and did."""

    problems: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    archived: list[str] = field(default_factory=list)
    freed_bytes: int = 0


def check(store: Store, artifacts: Artifacts, *, deep: bool = False) -> Report:
    """Look for what is wrong: tables, the database's own structure, missing (with `deep`: damaged) files."""
    report = Report()
    report.problems += [f"table structure: {each}" for each in migrate.differences(store.engine)]
    with store.read() as connection:
        if store.dialect == "sqlite":
            rows = connection.execute(text("PRAGMA integrity_check")).scalars()
            report.problems += [f"SQLite: {row}" for row in rows if row != "ok"]
            broken = connection.execute(text("PRAGMA foreign_key_check")).all()
            report.problems += [f"SQLite: a row of {row[0]} belongs to no run" for row in broken]
        else:
            for table in UNCHECKED:
                known = select(RUNS.c.run_no).where(RUNS.c.run_no == table.c.run_no)
                lost = connection.execute(select(table.c.run_no).where(~known.exists()).distinct()).scalars()
                report.problems += [f"rows of {table.name} belong to no run ({run_no})" for run_no in lost]
        for table in (RUNS, BLOCKS, TOKENS_CSV, TOKENS_STDOUT, ARTIFACTS):
            report.counts[table.name] = int(connection.execute(select(func.count()).select_from(table)).scalar() or 0)
        report.problems += _gaps_in_blocks(store)
        named = connection.execute(
            select(RUNS.c.run_id, ARTIFACTS.c.name, ARTIFACTS.c.sha256)
            .join(RUNS, RUNS.c.run_no == ARTIFACTS.c.run_no)
            .where(ARTIFACTS.c.state == "stored")
        ).all()
    good: set[str] = set()
    for run_id, name, sha256 in named:
        if sha256 in good:
            continue
        if problem := _object_problem(artifacts, sha256, deep=deep):
            report.problems.append(f"run {run_id[:12]}: {name}: {problem}")
        else:
            good.add(sha256)
    return report


def _object_problem(artifacts: Artifacts, sha256: str, *, deep: bool) -> str:
    if not artifacts.has(sha256):
        return f"its content {sha256[:12]} is not in {artifacts.url}"
    if deep:
        try:
            for _ in artifacts.chunks(sha256):
                pass
        except ArtifactError as error:
            return str(error)
    return ""


def _gaps_in_blocks(store: Store) -> list[str]:
    """Segments whose stored blocks do not add up to their cursor."""
    size = func.coalesce(func.sum(func.length(BLOCKS.c.data)), 0)
    query = (
        select(RUNS.c.run_id, CURSORS.c.segment, CURSORS.c.offset, size)
        .join(RUNS, RUNS.c.run_no == CURSORS.c.run_no)
        .outerjoin(BLOCKS, (BLOCKS.c.run_no == CURSORS.c.run_no) & (BLOCKS.c.segment == CURSORS.c.segment))
        .group_by(RUNS.c.run_id, CURSORS.c.segment, CURSORS.c.offset)
        .having(size != CURSORS.c.offset)
    )
    with store.read() as connection:
        return [
            f"run {run_id[:12]}, segment {segment[:8]}: {have} bytes of blocks, the cursor says {offset}"
            for run_id, segment, offset, have in connection.execute(query)
        ]


def vacuum(
    store: Store,
    artifacts: Artifacts,
    *,
    archive: Artifacts | None = None,
    older_than_days: float | None = None,
    dry_run: bool = False,
    now_ns: int | None = None,
) -> Report:
    """Remove objects no row names; with `archive` and `older_than_days`, move old runs' traces there; then compact."""
    report = Report()
    now = time.time_ns() if now_ns is None else now_ns
    if archive is not None and older_than_days is not None:
        _move(store, artifacts, archive, now - int(older_than_days * DAY_NS), report, dry_run=dry_run)
    for sha256, size in list(_unnamed(store, artifacts, now)):
        report.removed.append(sha256)
        report.freed_bytes += size
        if not dry_run:
            artifacts.remove(sha256)
    if not dry_run:
        _compact(store)
    return report


def _unnamed(store: Store, artifacts: Artifacts, now_ns: int) -> Iterator[tuple[str, int]]:
    with store.read() as connection:
        named = set(connection.execute(select(ARTIFACTS.c.sha256)).scalars())
        named |= set(connection.execute(select(LOOSE_FILES.c.sha256)).scalars())
    for sha256, size in artifacts.all():
        # A file is put here before the transaction that names it: young ones may be waiting for theirs.
        if sha256 not in named and artifacts.age_s(sha256, now_ns) > GRACE_S:
            yield sha256, size


def _move(
    store: Store, artifacts: Artifacts, archive: Artifacts, before_ns: int, report: Report, *, dry_run: bool
) -> None:
    query = (
        select(ARTIFACTS.c.run_no, ARTIFACTS.c.name, ARTIFACTS.c.sha256, ARTIFACTS.c.size)
        .join(RUNS, RUNS.c.run_no == ARTIFACTS.c.run_no)
        .where(RUNS.c.complete, RUNS.c.ended, RUNS.c.stored_wall_ns < before_ns)
        .where(ARTIFACTS.c.state == "stored", ARTIFACTS.c.kind.not_in(KEEP_HERE))
        .order_by(ARTIFACTS.c.run_no, ARTIFACTS.c.name)
    )
    with store.read() as connection:
        found = connection.execute(query).all()
    for run_no, name, sha256, size in found:
        report.archived.append(name)
        report.freed_bytes += size
        if dry_run:
            continue
        archive.put_chunks(artifacts.chunks(sha256), sha256)
        for _ in archive.chunks(sha256):  # read back: only then is it somewhere else
            pass
        with store.write() as connection:
            connection.execute(
                update(ARTIFACTS)
                .where(ARTIFACTS.c.run_no == run_no, ARTIFACTS.c.name == name)
                .values(state="archived", problem=f"{MOVED}{archive.url}")
            )
            others = connection.execute(
                select(func.count())
                .select_from(ARTIFACTS)
                .where(ARTIFACTS.c.sha256 == sha256, ARTIFACTS.c.state == "stored")
            ).scalar()
        if not others:
            artifacts.remove(sha256)


def _compact(store: Store) -> None:
    """Give unused pages back and refresh what the planner knows; neither may run inside a transaction."""
    raw = store.engine.raw_connection()
    try:
        driver = raw.driver_connection
        assert driver is not None
        if store.dialect == "sqlite":
            driver.execute("VACUUM")
            driver.execute("ANALYZE")
        else:
            driver.autocommit = True
            try:
                driver.execute("VACUUM ANALYZE")
            finally:
                driver.autocommit = False
    finally:
        raw.close()
