"""No room: what is given up is told, the end is always written, nothing unacknowledged is deleted."""

import contextlib
import errno
import os
import subprocess

import pytest
from bmoe_agent.spool import RunSummary, Spool, SpoolFullError, layout
from bmoe_agent.spool.room import RESERVE_BYTES, Disk
from bmoe_agent.spool.summary import read_ledger, write_ledger
from bmoe_proto.v1 import telemetry_pb2 as pb

pytestmark = pytest.mark.agent

RUN = b"r" * 16
STORE = b"S" * 16


class SmallDisk(Disk):
    """A disk of so many bytes; what the spool's reserve takes is given back when the file is gone."""

    def __init__(self, root, size) -> None:
        self.root, self.size = root, size
        self.half = False  # write half of what does not fit, as file systems do

    def _used(self):
        return sum(
            os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(self.root) for name in names
        )

    def free_bytes(self, path):
        return max(self.size - self._used(), 0)

    def write(self, descriptor, data):
        free = self.free_bytes(self.root)
        if len(data) > free:
            if self.half and free:
                return os.write(descriptor, bytes(data)[:free])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data)


def small(tmp_path, size, **options):
    disk = SmallDisk(tmp_path, size)
    return Spool(
        tmp_path, options.pop("quota", 1 << 30), disk=disk, low_water_bytes=options.pop("low", 0), **options
    ), disk


def kinds(spool):
    return [frame.WhichOneof("what") for frame in spool.frames(RUN)]


def gaps(spool):
    return [frame.gap for frame in spool.frames(RUN) if frame.HasField("gap")]


def test_at_its_quota_samples_are_given_up_and_told_and_output_goes_on(tmp_path):
    spool, _ = small(tmp_path, 1 << 30, quota=40_000)
    writer = spool.open_run(RUN)
    writer.append("run_started", pb.RunStarted(), 1)
    for at in range(40):
        writer.append("sample", pb.Sample(text=os.urandom(3_000)), at)
        writer.append("output", pb.Output(offset=at, data=b"token"), at)
        writer.flush()
    writer.end(pb.RunEnded(outcome="ok"), 99)
    frames = list(spool.frames(RUN))
    samples = sum(frame.HasField("sample") for frame in frames)
    assert 5 < samples < 20
    assert sum(frame.HasField("output") for frame in frames) == 40
    assert sum(gap.frames for gap in gaps(spool)) == 40 - samples
    assert {gap.what for gap in gaps(spool)} == {"samples"}
    assert "quota" in gaps(spool)[0].why
    assert frames[-1].HasField("run_ended")
    assert [frame.seq for frame in frames] == list(range(len(frames)))


def test_when_space_runs_low_samples_go_first(tmp_path):
    spool, disk = small(tmp_path, 2_000_000, low=1_000_000)
    writer = spool.open_run(RUN)
    writer.append("sample", pb.Sample(text=b"first"), 1)
    assert writer.flush()
    disk.size = 1_000_000
    writer.append("sample", pb.Sample(text=b"second"), 2)
    writer.append("output", pb.Output(data=b"token"), 2)
    assert writer.flush()
    disk.size = 2_000_000
    writer.append("sample", pb.Sample(text=b"third"), 3)
    assert writer.flush()
    assert kinds(spool) == ["segment_opened", "sample", "output", "sample", "gap"]
    assert (gaps(spool)[0].what, gaps(spool)[0].frames) == ("samples", 1)
    assert "bytes free" in gaps(spool)[0].why


@pytest.mark.parametrize("half", [False, True])
def test_on_a_full_disk_the_end_is_written_from_the_reserve(tmp_path, half):
    spool, disk = small(tmp_path, 2_000_000)
    disk.half = half
    assert os.path.getsize(tmp_path / "reserve") == RESERVE_BYTES
    writer = spool.open_run(RUN)
    writer.append("run_started", pb.RunStarted(), 1)
    writer.sync()
    disk.size = disk._used() + 40  # full: not even a header's worth
    for at in range(5):
        writer.append("sample", pb.Sample(text=os.urandom(3_000)), at)
        writer.append("output", pb.Output(offset=at, data=os.urandom(500)), at)
        assert not writer.flush()
    writer.end(pb.RunEnded(outcome="partial", cause="disk_full"), 99)
    assert not (tmp_path / "reserve").exists()
    found = kinds(spool)
    assert found[:2] == ["segment_opened", "run_started"]
    assert found[-1] == "run_ended"
    assert found.count("output") == 5
    assert (gaps(spool)[0].what, gaps(spool)[0].frames, gaps(spool)[0].why) == ("samples", 5, "the disk is full")
    # room again: so is the reserve
    disk.size = 4_000_000
    spool.open_run(b"2" * 16).seal()
    assert os.path.getsize(tmp_path / "reserve") == RESERVE_BYTES


def test_output_that_fits_nowhere_is_given_up_last_and_told(tmp_path):
    spool, disk = small(tmp_path, 2_000_000)
    writer = spool.open_run(RUN)
    writer.sync()
    disk.size = disk._used()
    for at in range(30):
        writer.append("output", pb.Output(offset=at, data=os.urandom(60_000)), at)
    assert writer._pending_bytes < 2 << 20  # bounded, whatever comes
    writer.append("turn", pb.TurnReport(state="done"), 50)
    writer.end(pb.RunEnded(outcome="partial"), 99)
    found = kinds(spool)
    assert found[-1] == "run_ended"
    assert "turn" in found
    assert sum(gap.frames for gap in gaps(spool) if gap.what == "output") + found.count("output") == 30


def test_a_launch_is_refused_when_its_start_cannot_be_durable(tmp_path):
    spool, disk = small(tmp_path, 2_000_000)
    disk.size = 0
    os.unlink(tmp_path / "reserve")
    writer = spool.open_run(RUN)
    writer.append("run_started", pb.RunStarted(), 1)
    with pytest.raises(SpoolFullError, match="free some space"):
        writer.sync()
    disk.size = 2_000_000
    writer.sync()
    assert kinds(spool) == ["segment_opened", "run_started"]


def test_a_full_disk_frees_what_the_store_has_and_nothing_else(tmp_path):
    spool, disk = small(tmp_path, 3_000_000, kept_for=STORE)
    for run_id in (b"1" * 16, b"2" * 16):
        writer = spool.open_run(run_id)
        writer.append("output", pb.Output(data=os.urandom(50_000)), 1)
        writer.end(pb.RunEnded(outcome="ok"), 2)
    (segment,) = spool.segments(b"1" * 16)
    spool.acknowledge(STORE, b"1" * 16, segment, 1 << 30)
    writer = spool.open_run(RUN)
    writer.sync()
    disk.size = disk._used()
    writer.append("output", pb.Output(data=os.urandom(30_000)), 1)
    assert writer.flush()
    assert spool.runs() == [b"2" * 16, RUN]
    assert (tmp_path / "reserve").exists()


def test_a_full_disk_does_not_keep_the_agent_from_stopping(tmp_path):
    spool, disk = small(tmp_path, 2_000_000)
    writer = spool.open_run(RUN)
    writer.sync()
    disk.size = 0
    os.unlink(tmp_path / "reserve")
    writer.append("note", pb.Note(code="x"), 1)
    spool.close()
    assert "no space" in spool.trouble
    assert kinds(Spool(tmp_path, 1 << 30)) == ["segment_opened"]


def test_another_error_of_the_disk_is_not_taken_for_want_of_room(tmp_path):
    spool, disk = small(tmp_path, 2_000_000)
    writer = spool.open_run(RUN)
    writer.append("note", pb.Note(code="x"), 1)

    def broken(descriptor, data):
        raise OSError(errno.EIO, "Input/output error")

    disk.write = broken
    with pytest.raises(OSError, match="Input/output"):
        writer.flush()
    del disk.write
    assert writer.flush()
    assert kinds(spool) == ["segment_opened", "note"]


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 1 MiB, or a skip where none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command here")
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_really_full(tiny_disk):
    spool = Spool(tiny_disk, 1 << 30, low_water_bytes=0)
    writer = spool.open_run(RUN)
    writer.append("run_started", pb.RunStarted(), 1)
    writer.sync()
    with open(tiny_disk / "somebody else's", "wb", buffering=0) as file:
        file.write(bytes(2 << 20))  # as much as there is
    for at in range(20):
        writer.append("sample", pb.Sample(text=os.urandom(5_000)), at)
        writer.append("output", pb.Output(offset=at, data=os.urandom(2_000)), at)
        writer.flush()
    writer.end(pb.RunEnded(outcome="failed", cause="disk_full"), 99)
    spool.close()
    found = kinds(Spool(tiny_disk, 1 << 30))
    assert found[-1] == "run_ended"
    assert found.count("output") == 20
    assert sum(gap.frames for gap in gaps(spool)) + found.count("sample") == 20
    assert gaps(spool)


def test_a_ledger_line_that_fits_only_in_part_deletes_nothing(tiny_disk):
    """The system writes what fits and says so without an error; half a line would have its cell run again."""
    ledger = tiny_disk / layout.LEDGER
    ledger.write_bytes(b" " * 4090 + b"\n")  # five bytes are left of its page, and no page beside it
    with contextlib.suppress(OSError), (tiny_disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    summary = RunSummary(RUN, cell="c", started=True, ended=True)
    with pytest.raises(OSError, match="No space"):
        write_ledger(str(tiny_disk), [summary])
    assert ledger.stat().st_size == 4091
    (tiny_disk / "filler").unlink()
    write_ledger(str(tiny_disk), [summary])
    assert [found.run_id for found in read_ledger(str(tiny_disk))] == [RUN]


def test_what_is_written_in_small_parts_is_written_whole(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    layout.replace_file(str(tmp_path / "acks.json"), b"x" * 100, durable=True)
    assert (tmp_path / "acks.json").read_bytes() == b"x" * 100
