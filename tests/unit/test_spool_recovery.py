"""What a killed writer, a phone without power or a bad flash cell leaves is cut, counted and told."""

import errno
import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc

import pytest
from bmoe_agent.spool import Spool, layout
from bmoe_proto import framing
from bmoe_proto.v1 import telemetry_pb2 as pb

pytestmark = pytest.mark.agent

RUN = b"r" * 16


def write_blocks(spool, count, *, end=False):
    """A segment of so many blocks; its path, where each block ends, and its frames."""
    writer = spool.open_run(RUN)
    ends = []
    for at in range(count):
        writer.append("output", pb.Output(offset=at, data=b"%d" % at * 50), at)
        writer.flush()
        ends.append(writer.segment.end)
    if end:
        writer.end(pb.RunEnded(outcome="ok"), 99)
    else:
        writer.seal()
    return writer.segment.path, ends


def frames_by_segment(spool):
    found = {}
    for frame in spool.frames(RUN):
        found.setdefault(frame.segment, []).append(frame)
    return [found[segment] for segment in spool.segments(RUN) if segment in found]


@pytest.mark.parametrize("cut", [1, 30, 67, 68, 75])
def test_a_torn_tail_is_cut_at_the_last_whole_block_and_told_in_the_next_segment(tmp_path, cut):
    path, ends = write_blocks(Spool(tmp_path, 1 << 30), 3)
    with open(path, "rb") as file:
        whole = file.read()
    os.truncate(path, ends[1] + cut)
    spool = Spool(tmp_path, 1 << 30)
    writer = spool.open_run(RUN)
    writer.append("note", pb.Note(code="again"), 5)
    ended = writer.end(pb.RunEnded(outcome="lost"), 9)
    spool.close()
    with open(path, "rb") as file:
        assert file.read() == whole[: ends[1]]
    first, second = frames_by_segment(spool)
    opened = second[0].segment_opened
    assert (opened.why, opened.previous_segment, opened.previous_torn_bytes) == ("restart", first[0].segment, cut)
    raw = b"".join(block.raw() for block in framing.scan(whole[: ends[1]]))
    assert (opened.previous_frames, opened.previous_sha256) == (len(first), hashlib.sha256(raw).digest())
    assert [(count.segment, count.frames) for count in ended.segments] == [
        (first[0].segment, 3),
        (second[0].segment, 2),
    ]
    assert ended.segments[0].sha256 == opened.previous_sha256
    assert not any(frame.HasField("gap") for frame in second)
    sizes = sum(file.stat().st_size for file in (tmp_path / RUN.hex()).glob("*.seg"))
    assert spool.used_bytes == spool.summary(RUN).bytes == sizes


@pytest.mark.parametrize("tail", [b"", bytes(4096)])
def test_a_phone_without_power_may_leave_an_empty_file_or_zeros(tmp_path, tail):
    path, ends = write_blocks(Spool(tmp_path, 1 << 30), 2)
    with open(path, "r+b") as file:
        file.truncate(ends[0] if tail else 0)
        file.seek(0, os.SEEK_END)
        file.write(tail)
    spool = Spool(tmp_path, 1 << 30)
    spool.open_run(RUN).seal()
    opened = frames_by_segment(spool)[-1][0].segment_opened
    assert (opened.previous_frames, opened.previous_torn_bytes) == ((2, 4096) if tail else (0, 0))
    assert len(spool.segments(RUN)) == 2


def test_a_flipped_bit_in_an_earlier_segment_costs_the_rest_of_that_segment_alone(tmp_path):
    spool = Spool(tmp_path, 1 << 30)
    path, ends = write_blocks(spool, 4)
    write_blocks(spool, 2, end=True)
    spool.close()
    with open(path, "r+b") as file:
        file.seek(ends[1] + 80)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    with open(path, "rb") as file:
        as_found = file.read()

    spool = Spool(tmp_path, 1 << 30)
    first, second = spool.segments(RUN)
    chunk = spool.read(RUN, first, 0)
    assert chunk.next_offset == ends[1]
    assert "checksum" in chunk.damage
    assert not chunk.finished
    spool.repair(RUN)
    assert spool.read(RUN, first, ends[1]).finished
    assert spool.read(RUN, second, 0).finished

    good, later, mended = frames_by_segment(spool)
    assert len(good) == 3
    assert [frame.WhichOneof("what") for frame in later] == ["segment_opened", "output", "output", "run_ended"]
    assert mended[0].segment_opened.why == "damaged"
    gap = mended[1].gap
    assert (gap.what, gap.lost_segment, gap.frames) == ("segment", first, 2)
    assert gap.bytes == len(as_found) - ends[1]
    with open(path.removesuffix(".seg") + ".damaged", "rb") as file:
        assert file.read() == as_found
    assert spool.summary(RUN).ended
    # and it is told once
    spool.repair(RUN)
    assert sum(frame.HasField("gap") for frame in spool.frames(RUN)) == 1


def test_damage_before_the_end_of_an_ended_run_does_not_cost_its_end(tmp_path):
    spool = Spool(tmp_path, 1 << 30)
    path, ends = write_blocks(spool, 3, end=True)
    spool.close()
    with open(path, "r+b") as file:
        file.seek(ends[1] + 80)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    spool = Spool(tmp_path, 1 << 30)
    assert spool.summary(RUN).ended  # the last block is whole
    spool.repair(RUN)
    good, mended = frames_by_segment(spool)
    assert [frame.WhichOneof("what") for frame in mended] == ["segment_opened", "gap", "run_ended"]
    ended = mended[-1].run_ended
    assert (ended.outcome, mended[-1].boot_ns) == ("ok", 99)
    assert [(count.segment, count.frames) for count in ended.segments] == [
        (good[0].segment, len(good)),
        (mended[0].segment, 2),
    ]
    assert Spool(tmp_path, 1 << 30).summary(RUN).ended


def test_a_kill_between_the_new_segment_and_the_cut_loses_nothing(tmp_path):
    path, ends = write_blocks(Spool(tmp_path, 1 << 30), 3)
    os.truncate(path, ends[2] - 5)
    Spool(tmp_path, 1 << 30).open_run(RUN).seal()
    with open(path, "ab") as file:  # as if the cut had not come to pass
        file.write(b"BMB1torn")
    spool = Spool(tmp_path, 1 << 30)
    spool.open_run(RUN).end(pb.RunEnded(outcome="ok"), 1)
    assert [len(frames) for frames in frames_by_segment(spool)] == [3, 1, 2]


def test_a_segment_of_any_length_is_looked_through_in_the_memory_of_a_block(tmp_path):
    spool = Spool(tmp_path, 1 << 30, low_water_bytes=0)
    writer = spool.open_run(RUN)
    for at in range(160):
        writer.append("output", pb.Output(offset=at, data=os.urandom(200_000)), at)
    writer.seal()
    with open(writer.segment.path, "ab") as file:
        file.write(b"BMB1torn")
    tracemalloc.start()
    try:
        found = layout.inspect(writer.segment.path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.frames, found.torn, found.left_over) == (161, True, 8)
    assert found.good_end > 30_000_000
    assert peak < 4_000_000


class Killed(BaseException):
    """The process is gone at this point."""


@pytest.mark.parametrize("at", ["copyfileobj", "replace", "truncate"])
def test_a_kill_while_a_damaged_file_is_put_aside_loses_no_good_block(tmp_path, monkeypatch, at):
    path, ends = write_blocks(Spool(tmp_path, 1 << 30), 4)
    flip(path, ends[1] + 80)

    def killed(*_args, **_options):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(shutil if at == "copyfileobj" else os, at, killed)
        with pytest.raises(Killed):
            Spool(tmp_path, 1 << 30).open_run(RUN)
    spool = Spool(tmp_path, 1 << 30)
    spool.open_run(RUN).end(pb.RunEnded(outcome="lost"), 9)
    good, *later = frames_by_segment(spool)
    assert len(good) == 3
    assert later[-1][-1].run_ended.segments[0].frames == 3
    assert os.path.getsize(path) == ends[1]
    assert os.path.getsize(path.removesuffix(".seg") + ".damaged") == ends[3]
    assert not list((tmp_path / RUN.hex()).glob("*.new"))


def test_a_damaged_file_that_there_is_no_room_for_stays_and_its_good_blocks_are_served(tmp_path, monkeypatch):
    path, ends = write_blocks(Spool(tmp_path, 1 << 30), 4)
    flip(path, ends[1] + 80)

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfileobj", full)
        spool = Spool(tmp_path, 1 << 30)
        spool.open_run(RUN).end(pb.RunEnded(outcome="lost"), 9)
    chunk = spool.read(RUN, spool.segments(RUN)[0], 0)
    assert (len(chunk.data), chunk.finished, chunk.damage) == (ends[1], True, "")
    assert os.path.getsize(path) == ends[3]
    assert not list((tmp_path / RUN.hex()).glob("*.damaged*"))
    spool = Spool(tmp_path, 1 << 30)
    spool.repair(RUN)
    assert os.path.getsize(path) == ends[1]


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_a_run_that_an_agent_was_killed_before_the_start_of_is_none(tmp_path):
    """Asking the engine and hashing the model can take a minute: readers hear nothing of the run before, nor after a kill."""
    spool = Spool(tmp_path, 1 << 30)
    writer = spool.open_run(RUN)
    spool.files_directory(RUN)
    assert writer.flush()
    assert spool.read(RUN, spool.segments(RUN)[0], 0).data == b""
    begun = spool.open_run(b"b" * 16)
    begun.append("run_started", pb.RunStarted(), 1)
    begun.flush()
    after_a_kill = Spool(tmp_path, 1 << 30)
    assert set(after_a_kill.runs()) == {RUN, b"b" * 16}  # who only looks leaves everything
    after_a_kill.drop_unbegun()
    assert after_a_kill.runs() == [b"b" * 16]
    assert not (tmp_path / RUN.hex()).exists()
    os.unlink(begun.segment.path)
    (tmp_path / (b"b" * 16).hex() / "files").mkdir()
    (tmp_path / (b"b" * 16).hex() / "files" / "pid").write_bytes(b" " * 10)
    prepared = Spool(tmp_path, 1 << 30)
    prepared.drop_unbegun()
    assert prepared.runs() == [b"b" * 16]


def test_a_run_that_cannot_be_opened_leaves_no_descriptor_and_no_empty_segment(tmp_path, monkeypatch):
    path, _ = write_blocks(Spool(tmp_path, 1 << 30), 2)
    spool = Spool(tmp_path, 1 << 30)

    def full(_descriptor):
        raise OSError(errno.EIO, "Input/output error")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(spool.room.disk, "write", lambda *_: full(0))
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output"):
            spool.open_run(RUN)
    assert os.listdir("/proc/self/fd") == before
    assert [str(found) for found in (tmp_path / RUN.hex()).glob("*.seg")] == [path]
    monkeypatch.undo()
    spool.open_run(RUN).seal()


WRITER = """
import os, sys
from bmoe_agent.spool import Spool
from bmoe_proto.v1 import telemetry_pb2 as pb
spool = Spool(sys.argv[1], 1 << 30, low_water_bytes=0)
writer = spool.open_run(b"r" * 16)
writer.append("note", pb.Note(code="began"), 1)
writer.sync()
print("began", flush=True)
at = 0
while True:
    writer.append("output", pb.Output(offset=at, data=os.urandom(at % 4000)), at)
    at += 1
    if at % 50 == 0:
        writer.flush()
        print(at, flush=True)
"""


def test_a_writer_killed_again_and_again_loses_nothing_it_had_written(tmp_path):
    promised = []
    for round_number in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, tmp_path],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            said = 0
            assert child.stdout.readline() == b"began\n"
            while said < 50 * (round_number + 1):
                said = int(child.stdout.readline())
        finally:
            child.send_signal(signal.SIGKILL)
            rest = child.communicate()[0].split(b"\n")[:-1]
        promised.append(int(rest[-1]) if rest else said)
    spool = Spool(tmp_path, 1 << 30)
    ended = spool.open_run(RUN).end(pb.RunEnded(outcome="lost"), 1)
    groups = frames_by_segment(spool)
    assert len(groups) == 5
    for frames, least in zip(groups, promised, strict=False):
        outputs = [frame.output.offset for frame in frames if frame.HasField("output")]
        assert outputs == list(range(len(outputs)))
        assert len(outputs) >= least
        assert [frame.seq for frame in frames] == list(range(len(frames)))
    assert [count.frames for count in ended.segments] == [len(frames) for frames in groups[:-1]] + [1]
    for before, after in itertools.pairwise(groups):
        opened = after[0].segment_opened
        assert (opened.previous_segment, opened.previous_frames) == (before[0].segment, len(before))
