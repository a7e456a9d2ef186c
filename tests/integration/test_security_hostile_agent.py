"""A phone that is not what it was: an agent that knows its secret and sends a collector whatever it likes.

What it says of its own runs is stored or refused; other phones' runs, the host's memory and its disk are not its to take.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import struct
import tracemalloc
import zlib

import pytest
from bmoe_collector.fleet.files import FileFetcher
from bmoe_collector.ingest import IngestError, Ingestor, finish
from bmoe_collector.store.artifacts import Artifacts
from bmoe_collector.store.engine import open_store
from bmoe_collector.store.load import load_run
from bmoe_proto import calls, framing
from bmoe_proto.v1 import telemetry_pb2 as pb
from support import records

RUN, OTHER = b"a" * 16, b"b" * 16
HONEST, HOSTILE = b"1" * 16, b"2" * 16
BIG = 2**64 - 1


@pytest.fixture
def taker(store_url, tmp_path):
    with contextlib.closing(open_store(store_url)) as store:
        yield Ingestor(store, Artifacts(str(tmp_path / "artifacts")))


@pytest.fixture
def sqlite_taker(tmp_path):
    with contextlib.closing(open_store(f"sqlite:///{tmp_path}/runs.db")) as store:
        yield Ingestor(store, Artifacts(str(tmp_path / "artifacts")))


def deliver(taker, record, agent=HONEST):
    for cursor, data in record.batches():
        taker.blocks(agent, cursor, data)


def bomb(count, raw_bytes=framing.MAX_RAW_BYTES):
    """Blocks of few bytes that say and are 16 MiB each: one frame of zeros (no Frame, but bytes to keep)."""
    raw = framing.varint(raw_bytes - 4) + bytes(raw_bytes - 4)
    assert len(raw) == raw_bytes
    payload = zlib.compress(raw, 9)
    out = b""
    for at in range(count):
        head = struct.pack("<4sHBx16s16sQIIII", b"BMB1", 68, 1, RUN, b"s" * 16, at, 1, raw_bytes, len(payload),
                           zlib.crc32(payload))  # fmt: skip
        out += head + struct.pack("<I", zlib.crc32(head)) + payload
    return out


def test_a_batch_of_bombs_is_taken_in_bounded_memory(sqlite_taker):
    cursor, data = pb.Cursor(run_id=RUN, segment=b"s" * 16), bomb(40)
    assert len(data) < 1 << 20
    tracemalloc.start()
    try:
        stands = sqlite_taker.blocks(HOSTILE, cursor, data)
        # 640 MiB in all; what is held at once is a few of the biggest blocks
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    assert stands.offset == len(data)


def test_another_phones_run_is_not_to_be_added_to(taker):
    record = records.whole(RUN, records.oneshot(), b"")
    deliver(taker, record)
    before = load_run(taker.store, RUN.hex()).run
    forged = records.Record(RUN, seed=9)
    forged.add(note=pb.Note(code="forged", text="x"))
    forged.flush()
    for cursor, data in forged.batches():
        with pytest.raises(IngestError, match="another phone"):
            taker.blocks(HOSTILE, cursor, data)
    assert load_run(taker.store, RUN.hex()).run == before
    assert not taker.cursors(HOSTILE)
    # and the honest phone goes on
    deliver(taker, record)


def test_another_phones_file_is_not_to_be_given(taker, tmp_path):
    deliver(taker, records.whole(RUN, records.oneshot(), b""))
    fake = tmp_path / "fake"
    fake.write_bytes(b"# bmoe_metrics v2\n")
    sha = hashlib.sha256(fake.read_bytes()).digest()
    fetcher = FileFetcher(taker, HOSTILE, tmp_path / "parts")
    fetcher.expect(pb.FollowReply.Ended(run_id=RUN, artifacts=[facts("metrics.csv", 18, sha)]))
    with Giving(fake.read_bytes()) as client:
        assert fetcher.fetch(client, True, lambda: None) == 0
    assert not client.acknowledged
    assert not fetcher.pending()
    assert "metrics.csv" not in {artifact.name for artifact in load_run(taker.store, RUN.hex()).artifacts}


LYING = [
    pb.Cursor(run_id=RUN, segment=b"s" * 16, offset=BIG),
    pb.Cursor(run_id=RUN, segment=b"s" * 16, offset=1),
    pb.Cursor(run_id=b"", segment=b"s" * 16),
    pb.Cursor(run_id=RUN, segment=b""),
    pb.Cursor(run_id=b"x" * 5000, segment=b"s" * 16),
    pb.Cursor(run_id=OTHER, segment=b"s" * 16),
]


def test_a_lying_cursor_is_refused_and_leaves_nothing(taker):
    data = framing.encode_block(RUN, b"s" * 16, 0, [b"x"])
    for cursor in LYING:
        with pytest.raises(IngestError):
            taker.blocks(HOSTILE, cursor, data)
    assert not taker.cursors(HOSTILE)
    with pytest.raises(LookupError):
        load_run(taker.store, RUN.hex())


NASTY = "a\0b\x1b]0;x\x07" + "é" * 300
FRAMES = {
    "start": {"run_started": pb.RunStarted(
        plan_id=NASTY, plan_name=NASTY, plan_sha256=NASTY, plan_text=NASTY, question_json="[" * 5000, plan_cells=2**32 - 1, attempt=2**32 - 1,
        cell=pb.Cell(name=NASTY, index=2**32 - 1, repeat=2**32 - 1, block=2**32 - 1, model=NASTY, flags=[NASTY], labels={NASTY: NASTY, "": ""},
                     environment={NASTY: NASTY}, preheat_s=math.nan, prompt=b"\0\xff"),
        device=pb.DeviceFacts(agent_uuid=b"short", name=NASTY, properties={NASTY: NASTY}, page_bytes=2**32 - 1, memory_total_kib=BIG,
                              cpus=[pb.CpuFacts(cpu=2**32 - 1, max_khz=BIG, policy=NASTY)]),
        engine=pb.EngineFacts(name=NASTY, path=NASTY, size=BIG, sha256=NASTY, version_text=NASTY, help_text=NASTY),
        model=pb.ModelFacts(name=NASTY, size=BIG, identity=NASTY, metadata={NASTY: NASTY}, dense_bytes=BIG, expert_bytes=BIG, problem=NASTY,
                            shards=[pb.FileFacts(path=NASTY, size=BIG, mtime_ns=-(2**63))]),
        argv=[b"\0\xff", b""], environment={NASTY: NASTY}, directory=NASTY,
        clock=pb.ClockPair(boot_ns=BIG, wall_ns=BIG, uncertainty_ns=BIG, boot_id=NASTY))},
    "launched": {"launched": pb.Launched(pid=2**32 - 1, start_ticks=BIG)},
    "output": {"output": pb.Output(stream=1, offset=0, data=b'BMOE_PROGRESS {"t":1e999,"step":99999999999999999999999,"tok":"\\u0000\\ud800"}\nBMOE_DONE [[[\n',
                                   uncertainty_ns=BIG, line_ends=[2**32 - 1])},
    "output beyond": {"output": pb.Output(stream=1, offset=BIG, data=b"x\n")},
    "output of no stream": {"output": pb.Output(stream=77, offset=3, data=b"x\n")},
    "sample": {"sample": pb.Sample(kind=NASTY, text=b"\x01\xff\xff", took_ns=BIG, source=NASTY)},
    "residency": {"residency": pb.Residency(method=NASTY, problem=NASTY, took_ns=BIG, cpu_ns=BIG, page_bytes=2**32 - 1, parts=[
        pb.ResidentPart(part=NASTY, bytes=BIG, pages=BIG, pages_looked_at=BIG, pages_resident=BIG, fraction=math.nan, standard_error=math.inf)])},
    "gate": {"gate": pb.GateReport(gate=NASTY, asked=NASTY, bound=math.nan, last=math.inf, state=NASTY, waited_ns=BIG,
                                   readings=[pb.GateReading(boot_ns=BIG, value=math.nan, text=NASTY)])},
    "watchdog": {"watchdog": pb.WatchdogReport(rule=NASTY, bound=math.nan, seen=math.inf, action=NASTY, detail=NASTY)},
    "turn": {"turn": pb.TurnReport(index=2**32 - 1, request_id=-(2**63), state=NASTY, request=b"\0\xff", detail=NASTY)},
    "note": {"note": pb.Note(code=NASTY, text=NASTY, facts_json='{"a": NaN, "b": 1e999, "\\u0000": ' + "9" * 4000 + "}")},
    "deep note": {"note": pb.Note(code="x", facts_json="[" * 100_000)},
    "observer": {"observer": pb.ObserverCost(cpu_ns=BIG, wakeups=BIG, read_bytes=BIG, write_bytes=BIG, max_timer_slip_ns=BIG, samples=BIG)},
    "gap": {"gap": pb.Gap(what=NASTY, frames=BIG, bytes=BIG, why=NASTY, lost_segment=b"x")},
    "opened again": {"segment_opened": pb.SegmentOpened(previous_segment=b"q", previous_frames=BIG, wall_ns=BIG, why=NASTY, boot_id=NASTY)},
    "end": {"run_ended": pb.RunEnded(launched=True, exit_observed=True, exit_code=-(2**31), signal=2**31 - 1, outcome=NASTY, cause=NASTY,
                                     evidence=[NASTY], ended_by=NASTY, stdout_bytes=BIG, stderr_bytes=BIG, stdout_sha256=b"x",
                                     artifacts=[pb.ArtifactFacts(name="../" + NASTY, kind=NASTY, size=BIG, sha256=b"x", problem=NASTY)],
                                     segments=[pb.SegmentCount(segment=b"x", frames=BIG, sha256=b"y")],
                                     clock=pb.ClockPair(boot_ns=BIG, wall_ns=BIG, boot_id=NASTY), turns_asked=2**32 - 1)},
}  # fmt: skip


def test_values_beyond_all_bounds_do_not_stop_the_record(taker):
    """One frame that says such things, and the frames after it are stored all the same."""
    for at, (what, said) in enumerate(FRAMES.items()):
        for boot_ns in (0, BIG):
            run_id = bytes([at + 1, boot_ns != 0]) * 8
            record = records.Record(run_id, seed=at, per_block=1)
            if what != "start":
                record.add(run_started=records.started())
            here = record.segments[0]
            frame = pb.Frame(run_id=run_id, segment=here.name, seq=here.frames, boot_ns=boot_ns, **said)
            record.raw(frame.SerializeToString())
            record.add(note=pb.Note(code="after", text="still here"))
            record.flush()
            deliver(taker, record)
            found = load_run(taker.store, run_id.hex())
            assert any(note.code == "after" for note in found.notes), what


NO_FRAMES = [
    b"\xff\xff\xff",
    b"",
    pb.Frame(run_id=OTHER, segment=b"z" * 16, seq=BIG).SerializeToString(),
    pb.Frame(run_id=RUN, segment=b"s" * 16, seq=7, note=pb.Note(code="skipped ahead")).SerializeToString(),
]


def test_frames_that_are_none_are_kept_and_do_not_stop_the_record(taker):
    record = records.Record(RUN, per_block=1)
    record.add(run_started=records.started())
    for frame in NO_FRAMES:
        record.raw(frame)
    record.add(note=pb.Note(code="after"))
    record.flush()
    deliver(taker, record)
    assert any(note.code == "after" for note in load_run(taker.store, RUN.hex()).notes)


def test_a_block_with_a_number_beyond_the_database(taker):
    for first in (2**63, BIG):
        data = framing.encode_block(RUN, b"s" * 16, first, [pb.Frame(note=pb.Note(code="x")).SerializeToString()])
        with contextlib.suppress(IngestError):
            taker.blocks(HOSTILE, pb.Cursor(run_id=RUN, segment=b"s" * 16), data)


class Giving:
    """An agent's client whose files are as a hostile agent sends them."""

    def __init__(self, data=b"", endless=False, offsets=None) -> None:
        self.data, self.endless, self.offsets = data, endless, offsets
        self.acknowledged, self.sent = [], 0

    def __enter__(self) -> Giving:
        return self

    def __exit__(self, *_) -> None:
        pass

    def fetch(self, run_id, name, offset):
        at = offset
        while self.endless:
            self.sent += 1 << 20
            assert self.sent < 64 << 20, "nobody stops the stream"
            yield pb.FetchChunk(offset=at, data=bytes(1 << 20), size=BIG)
            at += 1 << 20
        yield pb.FetchChunk(offset=at, data=self.data[at:], size=len(self.data))

    def acknowledge_artifact(self, *what):
        self.acknowledged.append(what)


def facts(name, size, sha):
    return pb.ArtifactFacts(name=name, kind="metrics", size=size, sha256=sha)


class TestFiles:
    def fetcher(self, taker, tmp_path, *artifacts):
        deliver(taker, records.whole(RUN, records.oneshot(), b""), HOSTILE)
        made = FileFetcher(taker, HOSTILE, tmp_path / "parts")
        made.expect(pb.FollowReply.Ended(run_id=RUN, artifacts=artifacts))
        return made

    def test_more_than_was_announced_is_not_written(self, sqlite_taker, tmp_path):
        fetcher = self.fetcher(sqlite_taker, tmp_path, facts("metrics.csv", 100, b"h" * 32))
        with Giving(endless=True) as client, contextlib.suppress(calls.CallError):
            fetcher.fetch(client, True, lambda: None)
        assert client.sent <= 4 << 20
        assert sum(path.stat().st_size for path in (tmp_path / "parts").iterdir()) <= 4 << 20
        assert not client.acknowledged

    def test_a_file_bigger_than_this_disk_is_not_begun(self, sqlite_taker, tmp_path):
        fetcher = self.fetcher(sqlite_taker, tmp_path, facts("metrics.csv", 2**60, b"h" * 32))
        with Giving(endless=True) as client:
            assert fetcher.fetch(client, True, lambda: None) == 0
        assert client.sent == 0

    @pytest.mark.parametrize("sha", [b"x", b"x" * 5000])
    def test_a_hash_that_is_none_names_no_file(self, sqlite_taker, tmp_path, sha):
        fetcher = self.fetcher(sqlite_taker, tmp_path, facts("metrics.csv", 5, sha))
        with Giving(b"12345") as client:
            assert fetcher.fetch(client, True, lambda: None) == 0
        assert not client.acknowledged

    def test_a_name_with_a_path_is_a_name_and_goes_nowhere(self, sqlite_taker, tmp_path):
        data = b"step,wall_ms\n1,2\n"
        sha = hashlib.sha256(data).digest()
        fetcher = self.fetcher(sqlite_taker, tmp_path, facts("../../../up.csv", len(data), sha))
        before = {path for path in tmp_path.parent.rglob("*") if path.name == "up.csv"}
        with Giving(data) as client:
            fetcher.fetch(client, True, lambda: None)
        assert {path for path in tmp_path.parent.rglob("*") if path.name == "up.csv"} == before
        assert not os.path.exists(tmp_path / "up.csv")

    def test_a_flood_of_files_is_bounded(self, sqlite_taker, tmp_path):
        flood = [facts(f"{at}", 1, b"h" * 32) for at in range(5000)]
        assert self.fetcher(sqlite_taker, tmp_path, *flood).pending() <= 256

    def test_metrics_beyond_memory_are_kept_and_not_read(self, sqlite_taker, tmp_path, monkeypatch):
        monkeypatch.setattr(finish, "MOST_METRICS_BYTES", 1000)
        data = b"# bmoe_metrics v2\nstep,wall_ms\n" + b"1,2.0\n" * 400
        fetcher = self.fetcher(sqlite_taker, tmp_path, facts("metrics.csv", len(data), hashlib.sha256(data).digest()))
        with Giving(data) as client:
            assert fetcher.fetch(client, True, lambda: None) == 1
        found = load_run(sqlite_taker.store, RUN.hex())
        assert not len(found.csv)
        assert any("without rows" in str(problem) for problem in found.run["problems"])
        assert sqlite_taker.artifacts.get(hashlib.sha256(data).hexdigest()) == data
