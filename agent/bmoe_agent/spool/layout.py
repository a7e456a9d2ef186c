"""Where a spool keeps what, and how one segment file is looked through.

In: paths and bytes. Out: names, and what a segment holds. On disk:

    spool/
      reserve                       given back when the disk is full, so that an end can still be written
      deleted.jsonl                 ledger.py: what was deleted after it was acknowledged, a line a run
      <run id, 32 hex digits>/
        0000-<segment id>.seg       blocks (bmoe_proto/framing.py), append-only, one file for every writer start
        0001-<segment id>.seg
        0000-<segment id>.damaged   a file as it was found, whose good beginning is now the .seg beside it
        acks.json                   acks.py: what the store has committed
        files/                      the engine's own files: stdout, stderr, CSV, traces
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from dataclasses import dataclass, field

from bmoe_proto import framing
from bmoe_proto.v1 import telemetry_pb2 as pb

RUN_NAME = re.compile(r"^[0-9a-f]{32}$")
SEGMENT_NAME = re.compile(r"^(\d{4,})-([0-9a-f]{32})\.seg$")
FILES = "files"
ACKS = "acks.json"
RESERVE = "reserve"
LEDGER = "deleted.jsonl"


class SpoolError(Exception):
    """Something the spool cannot do; the message says what, where and what to do."""


class SpoolFullError(SpoolError):
    """The disk is full and what must be durable is not."""


@dataclass(slots=True)
class Segment:
    """A segment file by name; `end` is how much of it is known to be there (the writer's own count while it is open)."""

    ordinal: int
    segment: bytes
    path: str
    end: int = 0


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a segment file holds: whole blocks up to `good_end`, `frames` in them, and what lies behind them."""

    good_end: int
    frames: int
    sha256: bytes  # over the frames, each with its length before it
    left_over: int = 0  # bytes behind the last whole block
    reason: str = ""
    torn: bool = False  # what is left over is the beginning of a block, as a killed writer leaves it
    opened: pb.SegmentOpened = field(default_factory=pb.SegmentOpened)


def segment_file_name(ordinal: int, segment: bytes) -> str:
    """Ordinals sort by name, so a listing is in order of writing."""
    return f"{ordinal:04d}-{segment.hex()}.seg"


def list_segments(directory: str) -> list[Segment]:
    """The segments of a run's directory in order, with their files' sizes."""
    found: list[Segment] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            match = SEGMENT_NAME.match(entry.name)
            if match:
                found.append(
                    Segment(
                        int(match[1]), bytes.fromhex(match[2]), entry.path, entry.stat(follow_symlinks=False).st_size
                    )
                )
    return sorted(found, key=lambda segment: segment.ordinal)


def inspect(path: str) -> Inspection:
    """Look through a whole segment file: every block is checked, decompressed, counted and hashed. One block is in memory."""
    digest = hashlib.sha256()
    frames = good_end = 0
    opened = pb.SegmentOpened()
    reason, torn = "", False
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            while good_end < size:
                block = framing.read_block(_block_at(file.fileno(), good_end))
                raw = block.raw()
                if block.first_seq != frames:
                    raise framing.FramingError(good_end, f"frame {block.first_seq} where {frames} comes next")
                if frames == 0:
                    first = pb.Frame.FromString(block.frames()[0])
                    opened = first.segment_opened
                digest.update(raw)
                frames += block.count
                good_end += block.end
        except framing.FramingError as error:
            reason, torn = error.reason, error.torn
    return Inspection(good_end, frames, digest.digest(), size - good_end, reason, torn, opened)


def _block_at(descriptor: int, offset: int) -> bytes:
    """The bytes of the block that seems to begin there, or as much of them as shows that there is none."""
    header = os.pread(descriptor, framing.HEADER_BYTES, offset)
    length = framing.peek_length(header)
    return header if length is None else os.pread(descriptor, min(length, framing.MAX_BLOCK_BYTES), offset)


def last_block_offset(path: str, end: int) -> int | None:
    """Where the last block before `end` begins, hopping over headers without reading payloads; None without one."""
    last = None
    with open(path, "rb") as file:
        offset = 0
        while offset + framing.HEADER_BYTES <= end:
            length = framing.peek_length(os.pread(file.fileno(), framing.HEADER_BYTES, offset))
            if length is None or offset + length > end:
                break
            last = offset
            offset += length
    return last


def next_block_offset(path: str, offset: int) -> int | None:
    """Where the block behind the one at `offset` begins; None when there is none at `offset`."""
    length = framing.peek_length(read_at(path, offset, framing.HEADER_BYTES))
    return None if length is None else offset + length


def read_at(path: str, offset: int, length: int) -> bytes:
    """Bytes of a file from `offset`, fewer at its end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, length, offset)
    finally:
        os.close(descriptor)


def sync_directory(path: str) -> None:
    """Make names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(descriptor: int, data: bytes) -> None:
    """Write all of it; the system may take a part of what is asked, on a disk that is filling up for example."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace_file(path: str, data: bytes, *, durable: bool) -> None:
    """Put `data` at `path` in one step; a reader or a crash sees the old file or the new one, never a part."""
    draft = f"{path}.new"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write_whole(descriptor, data)
        if durable:
            os.fsync(descriptor)
    except OSError:
        os.unlink(draft)
        raise
    finally:
        os.close(descriptor)
    os.replace(draft, path)
    if durable:
        sync_directory(os.path.dirname(path))


def copy_file(path: str, target: str) -> None:
    """Copy a file durably; `target` is there whole or not at all."""
    draft = f"{target}.new"
    try:
        with open(path, "rb") as file, open(draft, "wb", opener=_private) as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
        raise
    os.replace(draft, target)
    sync_directory(os.path.dirname(target))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
