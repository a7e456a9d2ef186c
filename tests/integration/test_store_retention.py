"""What may go and what never: vacuum, archive, check."""

from __future__ import annotations

import time

import pytest
from bmoe_collector.ingest import Ingestor
from bmoe_collector.ingest.rebuild import reparse
from bmoe_collector.store import retention
from bmoe_collector.store import schema as tables
from bmoe_collector.store.artifacts import ArtifactError, Artifacts
from bmoe_collector.store.engine import open_store
from bmoe_collector.store.load import load_run
from sqlalchemy import delete, select, update
from support import records

DONE, WAITING = bytes.fromhex("11" * 16), bytes.fromhex("22" * 16)
ROUTE = (
    b"# route_trace v1\n# model=/m/tiny.gguf\nturn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n" * 40
)
DAY_NS = 86_400 * 10**9


@pytest.fixture
def taker(store_url, tmp_path):
    """A store with a complete run that has a trace, and one whose trace has not come yet."""
    store = open_store(store_url)
    taker = Ingestor(store, Artifacts(str(tmp_path / "artifacts")))
    for run_id in (DONE, WAITING):
        record = records.whole(run_id, records.oneshot(5), seed=run_id[0], artifacts={"route.csv": ("route", ROUTE)})
        for cursor, data in record.batches():
            taker.blocks(records.AGENT, cursor, data)
    trace = tmp_path / "route.csv"
    trace.write_bytes(ROUTE)
    sha = next(each.sha256 for each in taker.wanted(records.AGENT) if each.run_id == DONE)
    taker.artifact(DONE, "route.csv", "route", str(trace), sha)
    yield taker
    store.close()


def test_only_what_no_run_names_and_is_old_is_removed(taker):
    lost = taker.artifacts.put(b"stored for an import that never committed")
    later = time.time_ns() + 2 * DAY_NS
    assert retention.vacuum(taker.store, taker.artifacts).removed == []  # it may be waiting for its transaction
    assert retention.vacuum(taker.store, taker.artifacts, dry_run=True, now_ns=later).removed == [lost]
    assert taker.artifacts.has(lost)
    named = {sha for sha, _ in taker.artifacts.all()} - {lost}
    assert retention.vacuum(taker.store, taker.artifacts, now_ns=later).removed == [lost]
    assert {sha for sha, _ in taker.artifacts.all()} == named
    assert retention.check(taker.store, taker.artifacts, deep=True).problems == []


def test_traces_of_old_complete_runs_move_to_an_archive_that_was_read_back(taker, tmp_path):
    archive = Artifacts(str(tmp_path / "archive"))
    young = retention.vacuum(taker.store, taker.artifacts, archive=archive, older_than_days=30)
    assert young.archived == []
    later = time.time_ns() + 40 * DAY_NS
    moved = retention.vacuum(taker.store, taker.artifacts, archive=archive, older_than_days=30, now_ns=later)
    assert moved.archived == ["route.csv"]  # not the one that was never fetched, nor what rows are made from
    sha = next(artifact.sha256 for artifact in load_run(taker.store, DONE.hex()).artifacts if artifact.kind == "route")
    assert archive.get(sha) == ROUTE
    assert not taker.artifacts.has(sha)
    with taker.store.read() as connection:
        states = (
            connection.execute(select(tables.ARTIFACTS.c.state).order_by(tables.ARTIFACTS.c.run_no)).scalars().all()
        )
    assert sorted(states) == ["archived", "awaited", "stored", "stored"]
    assert load_run(taker.store, DONE.hex()).completeness["complete"]
    before = load_run(taker.store, DONE.hex()).turns
    reparse(taker.store, taker.artifacts, DONE.hex())  # the raw record is still here
    assert load_run(taker.store, DONE.hex()).turns == before


def test_nothing_leaves_for_an_archive_that_cannot_keep_it(taker, tmp_path, monkeypatch):
    archive = Artifacts(str(tmp_path / "archive"))

    def damaged(_sha: str):
        raise ArtifactError("read back wrong")

    monkeypatch.setattr(archive, "chunks", damaged)
    later = time.time_ns() + 40 * DAY_NS
    with pytest.raises(ArtifactError):
        retention.vacuum(taker.store, taker.artifacts, archive=archive, older_than_days=30, now_ns=later)
    sha = next(artifact.sha256 for artifact in load_run(taker.store, DONE.hex()).artifacts if artifact.kind == "route")
    assert taker.artifacts.get(sha) == ROUTE


def test_a_check_finds_cursors_that_blocks_do_not_reach(taker):
    with taker.store.write() as connection:
        connection.execute(update(tables.CURSORS).values(offset=tables.CURSORS.c.offset + 1))
    problems = retention.check(taker.store, taker.artifacts).problems
    assert len([problem for problem in problems if "the cursor says" in problem]) == 2


def test_a_check_finds_rows_of_a_run_that_somebody_deleted(taker):
    with taker.store.write() as connection:
        gone = connection.execute(select(tables.RUNS.c.run_no).where(tables.RUNS.c.run_id == DONE.hex())).scalar_one()
        connection.execute(delete(tables.RUNS).where(tables.RUNS.c.run_no == gone))
    problems = [each for each in retention.check(taker.store, taker.artifacts).problems if "belong to no run" in each]
    there = (
        []
        if taker.store.dialect == "sqlite"
        else [f"rows of {name} belong to no run ({gone})" for name in ("tokens_stdout", "samples")]
    )
    assert problems == there
