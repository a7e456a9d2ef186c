"""Blocks of a phone into the database: once, whole, in any pieces, from any collector, killed at any moment."""

from __future__ import annotations

import contextlib
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
from bmoe_collector.ingest import IngestError, Ingestor, finish, reader, rebuild, sink
from bmoe_collector.ingest.reader import RunReader
from bmoe_collector.ingest.rebuild import chain, reparse
from bmoe_collector.store import leases
from bmoe_collector.store import schema as tables
from bmoe_collector.store.load import load_run
from bmoe_proto.v1 import telemetry_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select
from support import records
from support.agents import wait_for
from support.ingesting import RUN, STDERR, close_stores, deliver, image, ingestor

__all__ = ["close_stores"]


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
