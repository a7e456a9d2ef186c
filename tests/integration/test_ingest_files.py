"""Files of a run beside its blocks: fetched before or after its end, imported before it was delivered."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from bmoe_collector.importer import import_paths
from bmoe_collector.ingest.rebuild import reparse
from bmoe_collector.store import schema as tables
from bmoe_collector.store.artifacts import ArtifactError
from bmoe_collector.store.find import find_run
from bmoe_collector.store.load import load_run
from bmoe_proto.v1 import telemetry_pb2 as pb
from sqlalchemy import func, select
from support import records
from support.ingesting import METRICS, RUN, STDERR, close_stores, deliver, image, ingestor

__all__ = ["close_stores"]


def test_fetched_files_are_verified_and_complete_the_run(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    route = b"# route_trace v1\nturn,phase,step\n" * 100
    record = records.whole(
        RUN, records.oneshot(), artifacts={"metrics.csv": ("metrics", METRICS), "route.csv": ("route", route)}
    )
    deliver(taker, record)
    wanted = {each.name: each for each in taker.wanted(records.AGENT)}
    assert set(wanted) == {"metrics.csv", "route.csv"}
    assert any(
        "metrics.csv has not been fetched" in r for r in load_run(taker.store, RUN.hex()).completeness["reasons"]
    )
    file = tmp_path / "fetched"
    file.write_bytes(METRICS + b"x")
    with pytest.raises(ArtifactError):
        taker.artifact(RUN, "metrics.csv", "metrics", str(file), wanted["metrics.csv"].sha256)
    file.write_bytes(METRICS)
    assert taker.artifact(RUN, "metrics.csv", "metrics", str(file), wanted["metrics.csv"].sha256)
    assert not taker.artifact(RUN, "metrics.csv", "metrics", str(file), wanted["metrics.csv"].sha256)
    found = load_run(taker.store, RUN.hex())
    assert len(found.csv) == 48
    assert found.csv.get("cache_hit_pct") == [None] * 48
    assert found.csv.get("majflt") == [0] * 48
    assert found.csv.get("arm")[:2] == ["a1", "a0"]
    assert found.preamble["model"] == "tiny b.gguf"
    assert found.preamble["novel_key"] == 7
    assert found.turns[0].summary["evictions"] == 198
    assert found.turns[0].summary["tok_s"] == 747.559  # the trailer's, not the report's rounded one
    assert found.turns[0].summary["new_key"] == 3
    assert found.turns[0].text == b"x" * 48
    merged = found.tokens()
    assert len(merged) == 48
    assert merged.get("wall_ms") == [1.118] * 48
    assert merged.get("read_mb") == [0.8] * 48
    taker.artifact_given_up(RUN, "route.csv", "the phone had no room for it")
    reasons = load_run(taker.store, RUN.hex()).completeness["reasons"]
    assert reasons == ["artifact route.csv cannot be had: the phone had no room for it"]
    before = image(taker.store)
    reparse(taker.store, taker.artifacts, RUN.hex())
    assert image(taker.store) == before


@pytest.mark.parametrize(("end", "said"), [({}, True), ({"exit_code": 3, "outcome": "failed"}, False)])
def test_a_file_that_is_cut_in_a_row_is_not_whole_where_the_engine_ended_well(tmp_path, end, said):
    """As by a disk that was full for a moment. An engine that broke may have written no more than that."""
    taker = ingestor(f"sqlite:///{tmp_path}/runs.db", tmp_path)
    cut = METRICS[: len(METRICS) // 2]
    deliver(taker, records.whole(RUN, records.oneshot(), artifacts={"metrics.csv": ("metrics", cut)}, **end))
    file = tmp_path / "fetched"
    file.write_bytes(cut)
    taker.artifact(RUN, "metrics.csv", "metrics", str(file), hashlib.sha256(cut).digest())
    found = load_run(taker.store, RUN.hex()).completeness["reasons"]
    assert any("metrics.csv ends in the middle of a row" in reason for reason in found) is said
    before = image(taker.store)
    reparse(taker.store, taker.artifacts, RUN.hex())
    assert image(taker.store) == before


def test_streams_of_which_nothing_came_are_not_awaited_for_ever(store_url, tmp_path):
    """Flash that lost the blocks they were in: the end alone says that there was something."""
    taker = ingestor(store_url, tmp_path)
    record = records.Record(RUN)
    record.add(run_started=records.started())
    record.add(gap=pb.Gap(what="segment", bytes=5356, why="its payload's checksum is wrong"))
    record.streams[pb.STREAM_STDOUT] += records.oneshot()
    record.output(STDERR, pb.STREAM_STDERR)
    record.end()
    deliver(taker, record)
    with taker.store.read() as connection:
        columns = (tables.ARTIFACTS.c.name, tables.ARTIFACTS.c.state, tables.ARTIFACTS.c.problem)
        found = sorted(map(tuple, connection.execute(select(*columns))))
    assert found == [("stderr", "stored", None), ("stdout", "given_up", "none of its bytes came")]
    assert taker.unsettled(records.AGENT) == []


def test_a_file_that_came_before_the_end_of_its_run_makes_no_difference(store_url, tmp_path):
    record = records.whole(RUN, records.oneshot(), artifacts={"metrics.csv": ("metrics", METRICS)})
    file = tmp_path / "fetched"
    file.write_bytes(METRICS)
    sha256 = hashlib.sha256(METRICS).digest()
    *first, last = record.batches([2, 4])
    taker = ingestor(store_url, tmp_path)
    for cursor, data in first:
        taker.blocks(records.AGENT, cursor, data)
    taker.artifact(RUN, "metrics.csv", "metrics", str(file), sha256)
    assert not load_run(taker.store, RUN.hex()).run["ended"]
    taker.blocks(records.AGENT, *last)
    found = load_run(taker.store, RUN.hex())
    assert (found.run["outcome"], len(found.csv), len(found.stdout), len(found.turns)) == ("ok", 48, 48, 1)
    assert found.turns[0].text == b"x" * 48
    assert found.turns[0].summary["evictions"] == 198
    before = image(taker.store)
    reparse(taker.store, taker.artifacts, RUN.hex())
    assert image(taker.store) == before


def put_files(folder: Path, files: dict[str, bytes]) -> str:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return str(folder)


def test_files_of_a_delivered_run_name_that_run(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    record = records.whole(RUN, records.oneshot(), STDERR, artifacts={"metrics.csv": ("metrics", METRICS)})
    deliver(taker, record)
    stdout = bytes(record.streams[pb.STREAM_STDOUT])
    folder = put_files(
        tmp_path / "pulled",
        {"stdout": stdout, "stderr": STDERR, "metrics.csv": METRICS, "run.json": b'{"argv": ["bmoe-cli"], "exit": 0}'},
    )
    done = import_paths(taker.store, taker.artifacts, [folder])
    assert [(run.run, run.already) for run in done.runs] == [(RUN.hex(), True)]
    found = load_run(taker.store, RUN.hex())
    assert found.run["source"] == "agent"
    assert len(found.csv) == 48  # not fetched yet, and the import had it
    assert found.completeness["complete"]
    with taker.store.read() as connection:
        assert connection.execute(select(func.count()).select_from(tables.RUNS)).scalar() == 1


def test_a_run_imported_before_it_was_delivered_is_that_run(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    record = records.whole(RUN, records.oneshot(), STDERR, artifacts={"metrics.csv": ("metrics", METRICS)})
    stdout = bytes(record.streams[pb.STREAM_STDOUT])
    folder = put_files(tmp_path / "pulled", {"x.stdout": stdout, "x.csv": METRICS, "x.metrics": b"peak_rss_kb=7\n"})
    before = import_paths(taker.store, taker.artifacts, [folder], {"who": "me"}).runs[0]
    assert not before.already
    deliver(taker, record)
    assert find_run(taker.store, before.run) == RUN.hex()
    found = load_run(taker.store, before.run)
    assert found.run["labels"]["who"] == "me"
    assert found.run["source"] == "agent"
    again = import_paths(taker.store, taker.artifacts, [folder]).runs[0]
    assert (again.run, again.already, again.added) == (RUN.hex(), True, [])
    with taker.store.read() as connection:  # nothing of the run it was imported as is left
        runs = set(connection.execute(select(tables.RUNS.c.run_no)).scalars())
        for table in tables.DERIVED:
            assert set(connection.execute(select(table.c.run_no)).scalars()) <= runs, table.name
