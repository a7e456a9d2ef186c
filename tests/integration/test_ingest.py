"""Blocks of a phone into the database: once, whole, in any pieces, from any collector, killed at any moment."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from bmoe_collector.importer import import_paths
from bmoe_collector.ingest import IngestError, Ingestor, finish, reader, rebuild, sink
from bmoe_collector.ingest.reader import RunReader
from bmoe_collector.ingest.rebuild import chain, reparse
from bmoe_collector.store import leases
from bmoe_collector.store import schema as tables
from bmoe_collector.store.artifacts import ArtifactError, Artifacts
from bmoe_collector.store.engine import Store, open_store
from bmoe_collector.store.find import find_run
from bmoe_collector.store.load import canonical, load_run
from bmoe_proto.v1 import telemetry_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select
from support import records
from support.agents import wait_for

RUN = bytes.fromhex("5a" * 16)
STDERR = b"load_tensors: some text\nbmoe: ready\n"
METRICS = (
    b"# bmoe_metrics v2\n# engine=0.19.0\n# model=tiny b.gguf arch=qwen3moe threads=2 n_expert_used=2\n"
    b"# moe_stream=1 cache_mb=4 overlap=0 novel_key=7\n"
    b"step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct,stall_ms,mgmt_ms,majflt,cpu_ms,"
    b"dense_resident_frac,turn,arm\n"
    + b"".join(
        b"%d,48,1.118,0.755,0.217,626688,-1,0.000,0.146,0,4.654,-1.000,0,a%d\n" % (step, step % 2)
        for step in range(1, 49)
    )
    + b"# summary tokens=48 s/tok=0.001 tok/s=747.559 read_MiB=38.4 evictions=198 majflt/tok=0.00 new_key=3\n"
)
VOLATILE = ("stored_wall_ns", "changed_wall_ns")


OPEN: list[Store] = []


@pytest.fixture(autouse=True)
def _close_stores():
    yield
    while OPEN:
        OPEN.pop().close()


def ingestor(url: str, folder: Path) -> Ingestor:
    OPEN.append(open_store(url))
    return Ingestor(OPEN[-1], Artifacts(str(folder / "artifacts")))


def deliver(taker: Ingestor, record: records.Record, cuts: list[int] | None = None) -> None:
    for cursor, data in record.batches(cuts):
        stands = taker.blocks(records.AGENT, cursor, data)
        assert stands.offset == cursor.offset + len(data)


def image(store: Store, run_id: bytes = RUN) -> str:
    """All that is stored of a run, comparable between databases."""
    found = json.loads(canonical(load_run(store, run_id.hex())))
    for name in VOLATILE:
        found["run"].pop(name)
    found["run"].pop("facts")
    with store.read() as connection:
        run_no = connection.execute(select(tables.RUNS.c.run_no).where(tables.RUNS.c.run_id == run_id.hex())).scalar()
        for table in (tables.BLOCKS, tables.CURSORS, tables.SEGMENTS):
            rows = connection.execute(select(table).where(table.c.run_no == run_no)).mappings()
            kept = [{k: v for k, v in row.items() if k not in ("run_no", "place")} for row in rows]
            found[table.name] = sorted(
                json.dumps(row, sort_keys=True, default=lambda b: bytes(b).hex()) for row in kept
            )
    return json.dumps(found, sort_keys=True)


def test_a_whole_run_is_in_its_row_and_its_tables(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    record = records.whole(RUN, records.oneshot(), STDERR)
    deliver(taker, record)
    found = load_run(taker.store, RUN.hex())
    run = found.run
    assert (run["outcome"], run["cause"], run["exit_code"], run["signal"], run["exit_observed"]) == (
        "ok",
        "tokens",
        0,
        None,
        True,
    )
    assert run["argv"][-2:] == ["-n", "48"]
    assert run["environment"] == {"HOME": "/home", "PATH": "/bin"}
    assert run["engine_sha256"] == "ef" * 32
    assert run["engine_version"] == "0.19.0"
    assert (run["model_size"], run["model_identity"]) == (2_000_000, "12" * 32)
    assert run["prompt"] == b"Hi"
    assert run["prompt_sha256"] == hashlib.sha256(b"Hi").hexdigest()
    assert run["device_name"] == "shelf-1"
    assert run["device_model"] == "Phone 9"
    assert run["device"]["page_bytes"] == 4096
    assert run["clock_uncertainty_ns"] == 20_000
    assert run["started_wall_ns"] > 1_699_999_999_000_000_000
    assert run["labels"] == {"cache": "4"}
    assert (run["n_tokens"], run["n_turns"]) == (48, 1)
    assert found.completeness["complete"], found.completeness
    assert found.completeness["frames"] == record.segments[0].frames
    assert len(found.stdout) == 48
    assert found.stdout.get("cache_hit_pct") == [None] * 48  # the contract's -1
    assert found.stdout.get("majflt") == [0] * 48  # a true zero
    assert len(found.loads) == 48
    assert found.turns[0].text == b"x" * 48
    assert found.turns[0].summary["tok_s"] == 200.0
    assert [line.name for line in found.report] == ["generation", "compute"]
    assert [sample.kind for sample in found.samples] == ["entry", "fast", "exit"]
    assert found.samples[0].values["rss_kib"] == 19484
    assert "EACCES" in found.samples[0].refused["proc/engine/io"]
    assert {look.part: look.fraction for look in found.residency} == {"whole": 0.5, "expert": None}
    assert found.gates[0].state == "held"
    assert found.observer["cpu_ms"] == 5.0
    assert {artifact.name for artifact in found.artifacts} == {"stdout", "stderr"}
    assert taker.artifacts.get(next(a.sha256 for a in found.artifacts if a.name == "stderr")) == STDERR
    with taker.store.read() as connection:
        assert connection.execute(select(tables.PLANS.c.name)).scalar() == "night"
        assert connection.execute(select(tables.DEVICES.c.model)).scalar() == "Phone 9"


def test_the_row_is_there_before_anything_else_of_the_run(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    record = records.Record(RUN, per_block=2)
    record.add(run_started=records.started())
    deliver(taker, record)
    found = load_run(taker.store, RUN.hex())
    assert found.run["outcome"] == "started"
    assert found.run["argv"]
    assert not found.completeness["complete"]


def test_while_it_runs_its_text_so_far_is_there(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    record = records.Record(RUN)
    record.add(run_started=records.started())
    record.output(records.progress(1, text="he") + records.progress(2, text="llo"))
    record.flush()
    deliver(taker, record)
    found = load_run(taker.store, RUN.hex())
    assert found.turns[0].text == b"hello"
    assert found.turns[0].state == "began"
    assert found.run["n_tokens"] == 2


# Every example makes its own record and databases; a few show what there is to see.
@settings(max_examples=8)
@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    restarts=st.lists(st.floats(0.05, 0.95), max_size=2),
    again=st.lists(st.integers(0, 40), max_size=6),
    forget=st.integers(2, 5),
)
def test_any_pieces_repeated_and_restarted_give_the_same_rows(cuts, seed, restarts, again, forget):
    record = records.whole(RUN, records.oneshot(30), STDERR, seed=seed, restarts=restarts, exit_code=0)
    with tempfile.TemporaryDirectory() as folder:
        at_once = ingestor(f"{folder}/a.db", Path(folder))
        deliver(at_once, record, [10_000])
        pieces = ingestor(f"{folder}/b.db", Path(folder))
        batches = list(record.batches(cuts))
        for number, (cursor, data) in enumerate(batches):
            pieces.blocks(records.AGENT, cursor, data)
            if number % forget == 0:  # a collector that was killed and came back
                pieces = Ingestor(pieces.store, pieces.artifacts)
            if number in again:
                old_cursor, old = batches[number // 2]
                pieces.blocks(records.AGENT, old_cursor, old)
        assert image(pieces.store) == image(at_once.store)
        before = image(pieces.store)
        reparse(pieces.store, pieces.artifacts, RUN.hex())
        assert image(pieces.store) == before
        assert json.loads(before)["completeness"]["complete"]
        at_once.store.close()
        pieces.store.close()


def test_two_collectors_in_turn_and_segments_in_any_order(store_url, tmp_path):
    record = records.whole(RUN, records.oneshot(40), STDERR, restarts=(0.3, 0.6))
    reference = ingestor(f"{tmp_path}/reference.db", tmp_path)
    deliver(reference, record)
    taker = ingestor(store_url, tmp_path)
    other = Ingestor(taker.store, taker.artifacts)
    batches = list(record.batches([3]))
    by_segment: dict[bytes, list[tuple[pb.Cursor, bytes]]] = {}
    for cursor, data in batches:
        by_segment.setdefault(cursor.segment, []).append((cursor, data))
    first, second, third = by_segment.values()
    for number, (cursor, data) in enumerate([*second, *first, *third]):
        (taker if number % 2 else other).blocks(records.AGENT, cursor, data)
    assert image(taker.store) == image(reference.store)


def test_phones_that_wait_for_each_other_are_committed_as_if_each_were_alone(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    shelf = [records.whole(bytes([number]) * 16, records.oneshot(), STDERR, seed=number) for number in range(6)]
    steps = [list(record.batches([2])) for record in shelf]
    cursor, data = steps[3][1]
    steps[3][1] = (pb.Cursor(run_id=cursor.run_id, segment=cursor.segment, offset=cursor.offset + 1), data)
    refused = []

    def send(number, step):
        cursor, data = steps[number][step]
        try:
            taker.blocks(bytes([number]) * 16, cursor, data)
        except IngestError:
            refused.append((number, step))

    for step in range(max(map(len, steps))):
        threads = [
            threading.Thread(target=send, args=(number, step)) for number in range(6) if step < len(steps[number])
        ]
        with taker.store.turn.taken() if taker.store.dialect == "sqlite" else contextlib.nullcontext():
            for thread in threads:
                thread.start()
            if taker.store.dialect == "sqlite":
                wait_for(lambda: len(taker._together._waiting) == len(threads), "all wait")  # noqa: B023 - this round's
        for thread in threads:
            thread.join()
    assert refused == [(3, step) for step in range(1, len(steps[3]))]  # its hole, and all behind it
    alone = ingestor(f"{tmp_path}/alone.db", tmp_path)
    for number, record in enumerate(shelf):
        for cursor, data in record.batches([2]):
            alone.blocks(bytes([number]) * 16, cursor, data)
        if number != 3:
            assert image(taker.store, record.run_id) == image(alone.store, record.run_id)
    deliver_rest = list(shelf[3].batches([2]))[1:]
    for cursor, data in deliver_rest:
        taker.blocks(bytes([3]) * 16, cursor, data)
    assert image(taker.store, shelf[3].run_id) == image(alone.store, shelf[3].run_id)


def test_what_went_to_a_server_before_its_batch_was_read_to_the_end_is_undone_with_it(store_url, tmp_path, monkeypatch):
    record = records.whole(RUN, records.oneshot(), STDERR, seed=1)
    reference = ingestor(f"{tmp_path}/reference.db", tmp_path)
    deliver(reference, record)
    monkeypatch.setattr(sink, "WORTH_SENDING", 1)
    taker = ingestor(store_url, tmp_path)
    read, taken = RunReader.block, []

    def block(self, *told):
        if len(taken) == 3:
            raise MemoryError
        taken.append(told)
        read(self, *told)

    monkeypatch.setattr(RunReader, "block", block)
    with pytest.raises(MemoryError):
        deliver(taker, record, [64])
    assert len(taken) == 3
    with taker.store.read() as connection:
        assert [
            connection.execute(select(func.count()).select_from(table)).scalar()
            for table in (tables.RUNS, tables.TOKENS_STDOUT, tables.BLOCKS)
        ] == [0, 0, 0]
    monkeypatch.setattr(RunReader, "block", read)
    deliver(taker, record, [64])
    assert image(taker.store) == image(reference.store)


def test_one_whose_phone_was_taken_over_commits_nothing_more(store_url, tmp_path):
    record = records.whole(RUN, records.oneshot(40), STDERR, restarts=(0.3, 0.6))
    reference = ingestor(f"{tmp_path}/reference.db", tmp_path)
    deliver(reference, record)
    slow = ingestor(store_url, tmp_path)
    other = Ingestor(slow.store, slow.artifacts)
    mine = leases.acquire(slow.store, "phone", "slow", 10, now_ns=0)

    def under(connection):
        if not leases.keep(connection, mine, 10, now_ns=0):
            raise LookupError

    batches = list(record.batches([1]))
    assert len(batches) > 3
    slow.blocks(records.AGENT, *batches[0], under)
    assert leases.acquire(slow.store, "phone", "other", 10, now_ns=60 * leases.NS_PER_S)
    before = image(slow.store)
    with pytest.raises(LookupError):
        slow.blocks(records.AGENT, *batches[1], under)
    assert image(slow.store) == before
    for cursor, data in batches[1:]:
        other.blocks(records.AGENT, cursor, data)
    assert image(slow.store) == image(reference.store)


def test_segments_are_read_in_the_order_of_writing():
    assert chain({"c": "b", "a": None, "b": "a"}) == ["a", "b", "c"]
    assert chain({"b": "lost", "c": "b"}) == ["b", "c"]
    assert chain({"a": "b", "b": "a"}) == ["a", "b"] or chain({"a": "b", "b": "a"}) == ["b", "a"]


def test_a_hole_other_bytes_and_nonsense_are_refused_and_what_is_good_is_kept(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    record = records.whole(RUN, records.oneshot(150), STDERR)
    batches = list(record.batches([2]))
    cursor, data = batches[0]
    taker.blocks(records.AGENT, cursor, data)
    with pytest.raises(IngestError, match="hole") as hole:
        taker.blocks(records.AGENT, *batches[2])
    assert hole.value.cursor.offset == len(data)
    changed = records.Record(RUN)
    changed.segments[0].name = record.segments[0].name
    changed.add(note=pb.Note(code="other"))
    changed.flush()
    with pytest.raises(IngestError, match="other bytes"):
        taker.blocks(records.AGENT, cursor, bytes(changed.segments[0].data))
    damaged = bytearray(batches[1][1])
    damaged[-3] ^= 1
    with pytest.raises(IngestError, match="checksum") as bad:
        taker.blocks(records.AGENT, batches[1][0], bytes(damaged))
    good = bad.value.cursor.offset
    assert len(data) < good < len(data) + len(damaged)
    torn = taker.blocks(
        records.AGENT, record.cursor(record.segments[0], good), bytes(batches[1][1][good - len(data) :])[:-5]
    )
    assert torn.offset == good
    for each in batches[1:]:
        taker.blocks(records.AGENT, *each)
    assert load_run(taker.store, RUN.hex()).completeness["complete"]
    assert [(c.segment, c.offset) for c in taker.cursors(records.AGENT)] == [
        (record.segments[0].name, len(record.segments[0].data))
    ]
    assert taker.cursors(records.AGENT, [b"\0" * 16]) == []


def test_counts_and_hashes_of_the_end_are_checked(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    lost = records.whole(RUN, records.oneshot(), STDERR, restarts=(0.5,))
    for cursor, data in lost.batches():
        if cursor.segment != lost.segments[0].name:
            taker.blocks(records.AGENT, cursor, data)
    found = load_run(taker.store, RUN.hex())
    assert any("none of its" in reason for reason in found.completeness["reasons"])
    assert any(note.code == "gap" and not note.facts["declared"] for note in found.notes)
    for cursor, data in lost.batches():
        taker.blocks(records.AGENT, cursor, data)
    assert load_run(taker.store, RUN.hex()).completeness["complete"]

    # A writer that was killed before its first block leaves a segment in which nothing was.
    nothing = records.Record(bytes.fromhex("6c" * 16))
    nothing.add(run_started=records.started())
    nothing.flush()
    nothing.segments.append(records.Segment(b"e" * 16))
    nothing.open()
    nothing.end()
    deliver(taker, nothing)
    assert load_run(taker.store, "6c" * 16).completeness["complete"]

    other = bytes.fromhex("6b" * 16)
    wrong = records.Record(other)
    wrong.add(run_started=records.started())
    wrong.segments[0].sha.update(b"not what was written")
    wrong.end()
    deliver(taker, wrong)
    reasons = load_run(taker.store, other.hex()).completeness["reasons"]
    assert any("hash" in reason for reason in reasons)


def test_frames_nobody_knows_are_kept_and_stop_nothing(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    record = records.Record(RUN)
    record.add(run_started=records.started())
    segment = record.segments[0]
    newer = pb.Frame(run_id=RUN, segment=segment.name, seq=2, boot_ns=77).SerializeToString() + b"\xfa\x01\x03abc"
    record.raw(newer)
    record.raw(b"\xff\xff\xff no frame at all")
    record.output(records.oneshot(3))
    record.end()
    deliver(taker, record)
    found = load_run(taker.store, RUN.hex())
    assert found.run["n_tokens"] == 3
    assert found.completeness["complete"]
    assert any("is no frame" in problem["what"] for problem in found.run["problems"])
    with taker.store.read() as connection:
        kept = connection.execute(select(tables.UNKNOWN_FRAMES.c.data).order_by(tables.UNKNOWN_FRAMES.c.at)).scalars()
        assert [bytes(data) for data in kept] == [newer, b"\xff\xff\xff no frame at all"]


def test_values_no_column_can_hold_go_beside_it(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    stdout = (
        records.progress(1, novel=3, novel_list="[1,2]")
        + records.progress(2)
        + records.progress(3).replace(b'"io_ms":4.5', b'"io_ms":%d' % 10**30)
        + b"BMOE_PROGRESS {broken\nnobody knows this \x00 line\n"
    )
    record = records.whole(RUN, stdout, exit_code=0)
    deliver(taker, record)
    found = load_run(taker.store, RUN.hex())
    assert found.stdout.get("novel") == [3, None]
    assert found.stdout.get("novel_list") == [[1, 2], None]
    assert any("BMOE_PROGRESS" in line and "1000000000000000000000000000000" in line for line in found.others)
    assert "BMOE_PROGRESS {broken" in found.others
    assert "nobody knows this ␀ line" in found.others
    assert found.run["outcome"] == "partial"  # no end record


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


def test_lines_that_the_engine_could_not_write_are_missed(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    lines = records.oneshot().splitlines(keepends=True)
    lost = [line for line in lines if line.startswith(b"BMOE_PROGRESS ")][10:13]
    deliver(taker, records.whole(RUN, b"".join(line for line in lines if line not in lost)))
    found = load_run(taker.store, RUN.hex())
    assert len(found.stdout) == 45
    assert found.completeness["reasons"] == ["stdout: the engine counts 3 tokens more than there are lines of"]
    assert (found.run["outcome"], found.run["cause"]) == ("ok", "tokens")  # lost lines are no end of generation


def test_a_run_of_any_length_is_read_again_in_bounded_memory(store_url, tmp_path, monkeypatch):
    """After a restart in mid-run, by `bmoe db reparse`, and where its streams become files."""
    noise = b"".join(b"moe-newer: line %d of what nobody knows yet\n" % at for at in range(3000))
    stdout = records.oneshot().replace(b"=== answer ===", noise + b"=== answer ===", 1)
    record = records.whole(RUN, stdout, STDERR * 50, restarts=(0.3,))
    batches = list(record.batches([5]))
    first = ingestor(store_url, tmp_path)
    for each in batches[: len(batches) * 2 // 3]:
        first.blocks(records.AGENT, *each)
    monkeypatch.setattr(rebuild, "PAGE_BLOCKS", 3)
    monkeypatch.setattr(rebuild, "MOST_ROWS", 100)
    monkeypatch.setattr(finish, "WHOLE", 1000)
    monkeypatch.setattr(reader, "WHOLE", 1000)
    most: list[int] = []
    block = RunReader.block

    def counted(self, *what):
        block(self, *what)
        most.append(self.sink.waiting())

    monkeypatch.setattr(RunReader, "block", counted)
    taker = ingestor(store_url, tmp_path)
    for each in batches:
        taker.blocks(records.AGENT, *each)
    before = image(taker.store)
    assert load_run(taker.store, RUN.hex()).completeness["complete"]
    most.clear()
    reparse(taker.store, taker.artifacts, RUN.hex())
    assert most
    assert max(most) < 1000
    assert image(taker.store) == before
    stored = {each.name: each for each in load_run(taker.store, RUN.hex()).artifacts}
    assert taker.artifacts.get(stored["stdout"].sha256) == stdout
    assert taker.artifacts.get(stored["stderr"].sha256) == STDERR * 50


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


def test_a_session_has_its_turns_with_what_was_asked(store_url, tmp_path):
    taker = ingestor(store_url, tmp_path)
    record = records.Record(RUN)
    start = records.started()
    start.cell.ClearField("prompt")
    for prompt in ("one", "two", "three"):
        start.cell.turns.add(kind="generate", prompt=prompt, n_predict=2)
    start.argv[:] = [b"bmoe-cli", b"--session"]
    record.add(run_started=start)
    record.output(
        b'BMOE_READY {"load_s":0.015,"arch":"qwen3moe","n_ctx":256,"think_ctl":"template","n_expert_used":2}\n'
    )
    asked = b'{"cmd":"generate","id":1,"prompt":"one"}\n'
    record.add(turn=pb.TurnReport(index=0, request_id=1, state="sent", request=asked))
    record.output(b'BMOE_BEGIN {"id":1}\n' + records.progress(1, 2) + records.progress(2, 2))
    record.output(
        b'BMOE_DONE {"id":1,"cancelled":false,"tokens":2,"tok_s":9.5,"cache_hit_pct":-1,"n_past":7,"reasoning":"","text":"xx"}\n'
    )
    record.add(turn=pb.TurnReport(index=0, request_id=1, state="done"))
    record.add(turn=pb.TurnReport(index=1, request_id=2, state="sent", request=b'{"cmd":"generate","id":2}\n'))
    record.output(b'BMOE_BEGIN {"id":2}\nBMOE_ERROR {"id":2,"fatal":false,"msg":"too long"}\n')
    record.add(turn=pb.TurnReport(index=1, request_id=2, state="rejected"))
    record.add(turn=pb.TurnReport(index=2, request_id=3, state="not_run", detail="the engine ended"))
    record.end(turns_asked=3, turns_sent=2, turns_ended=2, outcome="partial")
    deliver(taker, record)
    found = load_run(taker.store, RUN.hex())
    assert [(t.turn, t.request_id, t.state, t.tokens) for t in found.turns] == [
        (0, 1, "done", 2),
        (None, 2, "rejected", 0),
        (None, 3, "not_run", 0),
    ]
    assert found.turns[0].request == {"cmd": "generate", "id": 1, "prompt": "one"}
    assert found.turns[0].summary["tok_s"] == 9.5
    assert "cache_hit_pct" not in found.turns[0].summary
    assert found.turns[0].begin_boot_ns is not None
    assert found.turns[0].end_boot_ns >= found.turns[0].begin_boot_ns
    assert found.turns[1].error["msg"] == "too long"
    assert found.ready["arch"] == "qwen3moe"
    assert (found.run["n_turns"], found.run["n_tokens"], found.run["session"]) == (1, 2, True)
    assert (found.run["outcome"], found.run["cause"]) == ("partial", "rejected")


@pytest.mark.parametrize(
    ("end", "outcome", "cause"),
    [
        ({"exit_code": None, "signal": 9, "outcome": "killed"}, "killed", "signal:SIGKILL"),
        ({"exit_code": 1, "outcome": "failed"}, "failed", "exit"),
        ({"exit_observed": False, "exit_code": None, "cause": "abandoned", "outcome": "lost"}, "lost", "abandoned"),
        (
            {"launched": False, "exit_observed": False, "exit_code": None, "outcome": "skipped", "ended_by": "gate"},
            "skipped",
            "gate:cpu_temp_c",
        ),
        ({"ended_by": "user", "signal": 15, "exit_code": None, "outcome": "aborted"}, "aborted", "cancelled"),
    ],
)
def test_the_outcome_is_judged_again_from_the_record(tmp_path, end, outcome, cause):
    taker = ingestor(f"{tmp_path}/runs.db", tmp_path)
    record = records.Record(RUN)
    record.add(run_started=records.started())
    if outcome == "skipped":
        record.add(
            gate=pb.GateReport(
                gate="cpu_temp_c", asked="cpu_temp_c <= 45", last=60, unit="C", state="gave_up", policy="skip"
            )
        )
    record.end(
        **{key: value for key, value in end.items() if value is not None}
        | ({"exit_code": end["exit_code"]} if end.get("exit_code") is not None else {})
    )
    deliver(taker, record)
    run = load_run(taker.store, RUN.hex()).run
    assert (run["outcome"], run["cause"]) == (outcome, cause)
    assert run["problems"] is None  # the phone said the same


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


KILLED = """
import sys
from bmoe_collector.ingest import Ingestor
from bmoe_collector.store.artifacts import Artifacts
from bmoe_collector.store.engine import open_store
from bmoe_proto.v1 import telemetry_pb2 as pb
import pickle
url, folder, pieces = sys.argv[1:4]
taker = Ingestor(open_store(url), Artifacts(folder))
stand = {(c.run_id, c.segment): c.offset for c in taker.cursors(bytes(range(16)))}
for raw, data in pickle.load(open(pieces, "rb")):
    cursor = pb.Cursor.FromString(raw)
    if cursor.offset + len(data) <= stand.get((cursor.run_id, cursor.segment), 0):
        continue
    taker.blocks(bytes(range(16)), cursor, data)
    print("took", flush=True)
taker.catch_up(bytes(range(16)))
print("end", flush=True)
"""


def test_a_collector_killed_again_and_again_leaves_exactly_the_spool(store_url, tmp_path):
    import pickle

    record = records.whole(RUN, records.oneshot(300), STDERR * 50, restarts=(0.4,))
    pieces = tmp_path / "pieces"
    pieces.write_bytes(pickle.dumps([(c.SerializeToString(), d) for c, d in record.batches([1])]))
    reference = ingestor(f"{tmp_path}/reference.db", tmp_path)
    deliver(reference, record)
    for attempt in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, store_url, str(tmp_path / "artifacts"), str(pieces)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONWARNINGS": ""},
        )
        took = b""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and took.count(b"took") < 3 + attempt and b"end" not in took:
            line = process.stdout.readline()
            if not line:
                break
            took += line
        if b"end" in took:
            process.wait(30)
            process.stdout.close()
            break
        if attempt == 3:
            process.wait(60)  # now it may finish
        else:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
        process.stdout.close()
        if process.returncode == 0:
            break
    taker = ingestor(store_url, tmp_path)
    taker.catch_up(records.AGENT)
    assert image(taker.store) == image(reference.store)
