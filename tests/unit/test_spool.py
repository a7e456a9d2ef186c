"""The spool: frames in, the same frames out as whole blocks, deleted only when the one store has everything."""

import hashlib
import os
import threading

import pytest
from bmoe_agent.spool import FIELDS, Spool, SpoolError, Who
from bmoe_agent.spool.writer import encode_frame
from bmoe_proto import framing
from bmoe_proto.v1 import telemetry_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.agent

RUN = bytes(range(16))
STORE = b"S" * 16
OTHER = b"O" * 16


@pytest.fixture
def spool(tmp_path):
    made = Spool(tmp_path, 1 << 30, who=Who(b"u" * 16, "boot-1", "0.1.0"), kept_for=STORE, low_water_bytes=0)
    yield made
    made.close()


def started(name="c1", index=0, attempt=1):
    return pb.RunStarted(
        plan_id="p" * 32,
        plan_name="night",
        cell=pb.Cell(name=name, index=index, repeat=2),
        attempt=attempt,
        clock=pb.ClockPair(boot_ns=5, wall_ns=7_000, boot_id="boot-1"),
    )


def a_run(spool, run_id=RUN, outputs=3, artifacts=()):
    writer = spool.open_run(run_id)
    writer.append("run_started", started(), 10)
    writer.sync()
    for at in range(outputs):
        writer.append("output", pb.Output(stream=pb.STREAM_STDOUT, offset=at, data=b"x"), 20 + at)
    ended = writer.end(pb.RunEnded(outcome="ok", cause="tokens", launched=True, artifacts=artifacts), 99)
    return writer, ended


def served(spool, run_id, max_bytes=1 << 20):
    """Every block of a run, read the way a reader does."""
    data = b""
    for segment in spool.segments(run_id):
        offset = 0
        while True:
            chunk = spool.read(run_id, segment, offset, max_bytes)
            data += chunk.data
            if chunk.next_offset == offset:
                break
            offset = chunk.next_offset
        assert chunk.finished is not spool.is_open(run_id)
    return data


@settings(max_examples=60)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.sampled_from(sorted(FIELDS)), st.binary(max_size=300))
def test_a_frame_encoded_by_hand_is_what_protobuf_reads(seq, boot_ns, field, text):
    field = "sample" if field not in {"sample", "output", "note"} else field
    message = {
        "sample": pb.Sample(kind="fast", text=text),
        "output": pb.Output(offset=7, data=text),
        "note": pb.Note(code="x", text=text.hex()),
    }[field]
    prefix = b"\x0a\x10" + RUN + b"\x12\x10" + STORE
    frame = pb.Frame.FromString(encode_frame(prefix, seq, boot_ns, FIELDS[field], message.SerializeToString()))
    assert (frame.run_id, frame.segment, frame.seq, frame.boot_ns) == (RUN, STORE, seq, boot_ns)
    assert frame.WhichOneof("what") == field
    assert getattr(frame, field) == message


def test_frames_come_out_in_order_numbered_without_holes(spool):
    _, ended = a_run(spool)
    frames = list(spool.frames(RUN))
    assert [frame.WhichOneof("what") for frame in frames] == [
        "segment_opened",
        "run_started",
        "output",
        "output",
        "output",
        "run_ended",
    ]
    assert [frame.seq for frame in frames] == list(range(6))
    assert {frame.segment for frame in frames} == set(spool.segments(RUN))
    opened = frames[0].segment_opened
    assert (opened.why, opened.agent_uuid, opened.boot_id, opened.previous_segment) == (
        "start",
        b"u" * 16,
        "boot-1",
        b"",
    )
    # the end's counts and hash prove everything before it
    assert frames[-1].run_ended == ended
    (count,) = ended.segments
    raw = framing.join_frames([frame for block in framing.scan(served(spool, RUN)) for frame in block.frames()][:-1])
    assert (count.segment, count.frames, count.sha256) == (frames[0].segment, 5, hashlib.sha256(raw).digest())


@pytest.mark.parametrize("max_bytes", [1, 500, 1 << 20])
def test_bytes_are_served_as_they_lie(spool, max_bytes):
    writer = spool.open_run(RUN)
    for at in range(40):
        writer.append("output", pb.Output(offset=at, data=os.urandom(3000)), at)
        if at % 7 == 0:
            writer.flush()
    path = writer.segment.path
    writer.seal()
    with open(path, "rb") as file:
        assert served(spool, RUN, max_bytes) == file.read()


def test_nothing_pending_is_served_and_sync_makes_it_durable(spool):
    writer = spool.open_run(RUN)
    writer.append("run_started", started(), 10)
    assert list(spool.frames(RUN)) == []
    writer.sync()
    assert [frame.WhichOneof("what") for frame in spool.frames(RUN)] == ["segment_opened", "run_started"]
    assert spool.summary(RUN).cell == "c1"


def test_pending_frames_reach_the_file_within_seconds_by_themselves(spool):
    writer = spool.open_run(RUN)
    writer.append("note", pb.Note(code="x"), 1)
    generation, _ = spool.changed_since(0)
    assert spool.wait(generation, 30)
    assert len(list(spool.frames(RUN))) == 2


def test_a_full_block_is_written_without_waiting(spool):
    writer = spool.open_run(RUN)
    writer.append("sample", pb.Sample(text=os.urandom(70_000)), 1)
    assert len(list(spool.frames(RUN))) == 2


def test_several_threads_may_add(spool):
    writer = spool.open_run(RUN)
    threads = [
        threading.Thread(
            target=lambda who=who: [writer.append("output", pb.Output(offset=at, stream=who), at) for at in range(300)]
        )
        for who in (1, 2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.seal()
    frames = list(spool.frames(RUN))
    assert [frame.seq for frame in frames] == list(range(901))
    for who in (1, 2, 3):
        offsets = [frame.output.offset for frame in frames if frame.output.stream == who]
        assert offsets == list(range(300))


def test_misuse_is_refused_with_what_to_do(spool):
    writer = spool.open_run(RUN)
    with pytest.raises(SpoolError, match="being written already"):
        spool.open_run(RUN)
    with pytest.raises(ValueError, match="16 bytes"):
        spool.open_run(b"short")
    with pytest.raises(ValueError, match="split it"):
        writer.append_encoded(FIELDS["sample"], bytes(framing.MAX_RAW_BYTES), 1)
    writer.seal()
    writer.seal()
    with pytest.raises(SpoolError, match="sealed"):
        writer.append("note", pb.Note(), 1)


def test_a_cursor_beyond_what_the_phone_still_has_reads_as_nothing_more(spool):
    a_run(spool)
    (segment,) = spool.segments(RUN)
    chunk = spool.read(RUN, segment, 10_000_000)
    assert (chunk.data, chunk.next_offset, chunk.finished, chunk.damage) == (b"", 10_000_000, True, "")
    with pytest.raises(KeyError):
        spool.read(RUN, b"?" * 16, 0)


def acknowledge_all(spool, store, run_id=RUN):
    for segment in spool.segments(run_id):
        spool.acknowledge(store, run_id, segment, len(served(spool, run_id)))


def test_a_run_is_deleted_when_its_store_has_every_byte_and_every_file(spool):
    files = spool.files_directory(RUN)
    with open(os.path.join(files, "metrics.csv"), "wb") as file:
        file.write(b"rows")
    digest = hashlib.sha256(b"rows").digest()
    a_run(
        spool,
        artifacts=[
            pb.ArtifactFacts(name="metrics.csv", kind="metrics", size=4, sha256=digest),
            pb.ArtifactFacts(name="io.csv", kind="io", problem="was never written"),
        ],
    )
    used = spool.used_bytes
    (segment,) = spool.segments(RUN)
    size = len(served(spool, RUN))
    assert used == size + 4
    assert spool.backlog_bytes() == size

    acknowledge_all(spool, OTHER)
    assert spool.acknowledge_artifact(OTHER, RUN, "metrics.csv", digest) == ""
    assert spool.delete_acknowledged() == []  # another store's word frees nothing

    spool.acknowledge(STORE, RUN, segment, size - 1)
    assert spool.backlog_bytes() == 1
    spool.acknowledge(STORE, RUN, segment, 3)  # never back
    assert spool.backlog_bytes() == 1
    assert "fetch it again" in spool.acknowledge_artifact(STORE, RUN, "metrics.csv", b"?" * 32)
    assert "no file" in spool.acknowledge_artifact(STORE, RUN, "../secret", digest)
    assert spool.delete_acknowledged() == []
    spool.acknowledge(STORE, RUN, segment, size)
    assert not spool.acknowledged(RUN)
    spool.acknowledge_artifact(STORE, RUN, "metrics.csv", digest)
    assert spool.acknowledged(RUN)
    assert spool.delete_acknowledged() == [RUN]
    assert not os.path.exists(os.path.join(spool.root, RUN.hex()))
    assert spool.used_bytes == 0
    assert spool.backlog_bytes() == 0


def test_what_was_deleted_is_still_known_to_a_later_agent(spool, tmp_path):
    a_run(spool)
    acknowledge_all(spool, STORE)
    spool.delete_acknowledged()
    with open(tmp_path / "deleted.jsonl", "ab") as file:
        file.write(b'{"run_id": "00')  # the phone lost power while writing the next line
    later = Spool(tmp_path, 1 << 30, kept_for=STORE)
    (summary,) = later.summaries()
    assert (summary.run_id, summary.deleted, summary.ended, summary.outcome) == (RUN, True, True, "ok")
    assert (summary.plan_id, summary.cell, summary.repeat, summary.attempt) == ("p" * 32, "c1", 2, 1)
    a_run(later, b"2" * 16)
    acknowledge_all(later, STORE, b"2" * 16)
    later.delete_acknowledged()
    later.close()
    assert [run.run_id for run in Spool(tmp_path, 1 << 30).summaries()] == [RUN, b"2" * 16]


def test_an_open_or_unended_run_is_never_deleted(spool):
    writer = spool.open_run(RUN)
    writer.append("run_started", started(), 1)
    writer.sync()
    acknowledge_all(spool, STORE)
    assert spool.delete_acknowledged() == []
    writer.seal()
    acknowledge_all(spool, STORE)
    assert spool.delete_acknowledged() == []


def test_acknowledgements_survive_a_restart_and_a_broken_file_of_them_counts_as_none(spool, tmp_path):
    a_run(spool)
    acknowledge_all(spool, STORE)
    spool.save_acknowledgements()
    later = Spool(tmp_path, 1 << 30, kept_for=STORE)
    assert later.acknowledged(RUN)
    (tmp_path / RUN.hex() / "acks.json").write_bytes(b'{"53')
    assert not Spool(tmp_path, 1 << 30, kept_for=STORE).acknowledged(RUN)


def test_runs_are_found_again_oldest_first(spool, tmp_path):
    for at, run_id in enumerate([b"z" * 16, b"a" * 16, b"m" * 16]):
        writer = spool.open_run(run_id)
        told = started(index=at)
        told.clock.wall_ns = 1_000 + at
        writer.append("run_started", told, at)
        writer.end(pb.RunEnded(outcome="failed"), at)
    os.makedirs(tmp_path / "something else")
    later = Spool(tmp_path, 1 << 30)
    assert later.runs() == [b"z" * 16, b"a" * 16, b"m" * 16]
    assert [run.cell_index for run in later.summaries()] == [0, 1, 2]
    assert {run.outcome for run in later.summaries()} == {"failed"}
    assert later.used_bytes == spool.used_bytes


def test_a_run_has_started_wherever_the_flusher_cut_its_first_blocks(tmp_path):
    """A cell whose run is not known to have started would be run again."""
    spool = Spool(tmp_path, 1 << 30, low_water_bytes=0)
    writer = spool.open_run(RUN)
    writer.flush()  # the flusher came before RunStarted
    writer.append("gap", pb.Gap(what="samples"), 8)
    writer.flush()
    writer.append("run_started", started(index=4), 10)
    writer.sync()
    assert (spool.summary(RUN).started, spool.summary(RUN).cell_index) == (True, 4)
    writer.append("output", pb.Output(data=b"x"), 11)
    writer.flush()
    writer.end(pb.RunEnded(outcome="ok"), 99)
    spool.close()
    (found,) = Spool(tmp_path, 1 << 30).summaries()
    assert (found.started, found.ended, found.cell_index, found.outcome) == (True, True, 4, "ok")
