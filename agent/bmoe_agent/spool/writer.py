"""Writes one run's frames: numbers them, puts them into blocks, and into one append-only segment file.

In: messages with the boot-clock time of what they tell. Out: blocks on disk. A frame gets its number when its block is
written, so what has to be given up for want of room never leaves a hole in the numbers: a `Gap` says what it was.

At most `FLUSH_NS` of frames are in an unwritten block (the spool's flusher sees to it). `sync` is for the start and the
end: nothing is synced while a cell is measured (law 7). Safe to use from several threads.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from bmoe_proto import framing
from bmoe_proto.v1 import telemetry_pb2 as pb
from google.protobuf.message import Message

from bmoe_agent.spool import layout
from bmoe_agent.spool.layout import Segment, SpoolError, SpoolFullError
from bmoe_agent.spool.room import FULL_ERRNOS

if TYPE_CHECKING:
    from bmoe_agent.spool.spool import Spool

BLOCK_BYTES: Final = 64 << 10
FLUSH_NS: Final = 2_000_000_000
MAX_PENDING_BYTES: Final = 1 << 20
"""What may wait in memory for a full disk to have room again, before even the engine's output is given up."""
MAX_PAYLOAD_BYTES: Final = framing.MAX_RAW_BYTES - 256
FIELDS: Final[dict[str, int]] = {
    field.name: field.number for field in pb.Frame.DESCRIPTOR.oneofs_by_name["what"].fields
}
_TAGS: Final[dict[int, bytes]] = {number: framing.varint(number << 3 | 2) for number in FIELDS.values()}
_GIVEN_UP_FIRST: Final = {FIELDS["sample"]: "samples", FIELDS["residency"]: "samples", FIELDS["observer"]: "samples"}
_OPENING: Final = frozenset({FIELDS["segment_opened"], FIELDS["gap"]})
_GIVEN_UP_LAST: Final = {FIELDS["output"]: "output"}

_Pending = tuple[int, int, bytes]  # boot_ns, field number, payload


def encode_frame(prefix: bytes, seq: int, boot_ns: int, number: int, payload: bytes) -> bytes:
    """A serialised Frame by hand: run id and segment (`prefix`) never change, and pure-Python protobuf is slow."""
    varint = framing.varint
    return b"".join(
        (prefix, b"\x18", varint(seq), b"\x20", varint(boot_ns), _TAGS[number], varint(len(payload)), payload)
    )


class RunWriter:
    """The one writer of a run while it is open; made by `Spool.open_run`."""

    def __init__(
        self,
        spool: Spool,
        run_id: bytes,
        segment: Segment,
        earlier: list[pb.SegmentCount],
        changed: Callable[[RunWriter], None],
    ) -> None:
        self.run_id = run_id
        self.segment = segment
        self.frames = 0
        """Frames written to this segment so far."""
        self.given_up = 0
        """Frames given up for want of room, ever."""
        self._spool = spool
        self._earlier = earlier
        self._changed = changed
        self._prefix = framing.frame_prefix(run_id, segment.segment)
        self._digest = hashlib.sha256()
        self._lock = threading.RLock()
        self._pending: list[_Pending] = []
        self._pending_bytes = 0
        self._gaps: dict[str, pb.Gap] = {}
        self._gap_boot_ns = 0
        self._gap_written_ns = 0
        self._full = False  # the last write met a full disk
        self._closed = False
        self._directory_synced = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(segment.path, flags, 0o600)

    # ---------------------------------------------------------------- adding

    def append(self, field: str, message: Message, boot_ns: int) -> None:
        """Add a frame; `field` is the name in Frame's oneof ("sample", "output" …). Raises KeyError for another."""
        self.append_encoded(FIELDS[field], message.SerializeToString(), boot_ns)

    def append_encoded(self, number: int, payload: bytes, boot_ns: int) -> None:
        """Add a frame whose message is serialised already; `number` is its field's in Frame (`FIELDS`)."""
        size = len(payload)
        if size > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a frame of {size} bytes is more than a block's {MAX_PAYLOAD_BYTES}: split it")
        with self._lock:
            if self._closed:
                raise SpoolError(f"run {self.run_id.hex()} is sealed: nothing can be added to this writer")
            self._pending.append((boot_ns, number, payload))
            self._pending_bytes += size + 64
            if self._pending_bytes >= BLOCK_BYTES:
                self._write_out(last=False)

    # ---------------------------------------------------------------- writing

    def flush(self) -> bool:
        """Write what is pending to the file (not synced); returns whether all of it is there.

        A new run's opening waits for its start: a run that an agent was killed before is none, and no reader hears of it.
        """
        with self._lock:
            if self._closed:
                return True
            begun = self.frames or self._earlier or any(item[1] not in _OPENING for item in self._pending)
            return self._write_out(last=False) if begun else True

    def sync(self) -> None:
        """Make everything added so far durable, the file's name included. Raises SpoolFullError when it cannot be."""
        with self._lock:
            if not self._write_out(last=True):
                raise SpoolFullError(
                    f"no space for the record of run {self.run_id.hex()} in {self._spool.root}: free some space"
                )
            self._spool.room.disk.fsync(self._descriptor)
            if not self._directory_synced:
                directory = os.path.dirname(self.segment.path)
                layout.sync_directory(directory)
                layout.sync_directory(os.path.dirname(directory))
                self._directory_synced = True

    def counts(self) -> list[pb.SegmentCount]:
        """Frames and hash of every segment of the run, this one's as written so far (call `flush` before)."""
        with self._lock:
            own = pb.SegmentCount(segment=self.segment.segment, frames=self.frames, sha256=self._digest.digest())
            return [*self._earlier, own]

    def end(self, ended: pb.RunEnded, boot_ns: int) -> pb.RunEnded:
        """Write the run's last frame with the counts of all segments, make it durable and close.

        Returns the message as written. Raises SpoolFullError when not even the reserve made room.
        """
        with self._lock:
            if not self._write_out(last=True):
                raise SpoolFullError(f"no space for the end of run {self.run_id.hex()} in {self._spool.root}")
            del ended.segments[:]
            ended.segments.extend(self.counts())
            self.append("run_ended", ended, boot_ns)
            self.seal()
            return ended

    def seal(self) -> None:
        """Make everything durable and close; the run can be opened again, which begins another segment."""
        with self._lock:
            if self._closed:
                return
            try:
                self.sync()
            finally:
                self._closed = True
                os.close(self._descriptor)
                self._changed(self)

    def abandon(self) -> None:
        """Close without making anything durable, and remove a segment that got no block: the run could not be opened."""
        with self._lock:
            self._closed = True
            os.close(self._descriptor)
            if not self.segment.end:
                os.unlink(self.segment.path)

    @property
    def closed(self) -> bool:
        """Whether `seal` was called."""
        return self._closed

    def _write_out(self, *, last: bool) -> bool:
        """Put what is pending into the file; `last` means that it has to be there whatever must be given for it."""
        short = self._spool.room.short(self._spool.used_bytes) if self._pending else ""
        if short:
            self._give_up(_GIVEN_UP_FIRST, short)
        if self._gaps and (last or self._gap_due(short)):
            self._turn_gaps_into_frames()
        if not self._pending:
            return True
        if self._write_pending():
            return True
        self._give_up(_GIVEN_UP_FIRST, "the disk is full")
        if self._spool.delete_acknowledged() and self._write_pending():
            return True
        if self._pending_bytes > MAX_PENDING_BYTES:
            self._give_up(_GIVEN_UP_LAST, "the disk is full")
        if last and self._spool.room.give_reserve():
            if self._gaps:
                self._turn_gaps_into_frames()
            if self._write_pending():
                return True
            self._give_up(_GIVEN_UP_LAST, "the disk is full")
            self._turn_gaps_into_frames()
            return self._write_pending()
        return not self._pending

    def _write_pending(self) -> bool:
        """Write pending frames as blocks until none is left (True) or the disk is full (False)."""
        while self._pending:
            taken, size = 0, 0
            raw: list[bytes] = []
            for boot_ns, number, payload in self._pending:
                if taken and size + len(payload) > 4 * BLOCK_BYTES:
                    break
                frame = encode_frame(self._prefix, self.frames + taken, boot_ns, number, payload)
                raw.append(framing.varint(len(frame)))
                raw.append(frame)
                size += len(frame)
                taken += 1
            joined = b"".join(raw)
            block = framing.encode_raw(self.run_id, self.segment.segment, self.frames, taken, joined)
            if not self._write_block(block):
                return False
            self._digest.update(joined)
            self.frames += taken
            self.segment.end += len(block)
            done = self._pending[:taken]
            del self._pending[:taken]
            self._pending_bytes -= sum(len(payload) + 64 for _, _, payload in done)
            self._spool.wrote(self.run_id, len(block))
        return True

    def _write_block(self, block: bytes) -> bool:
        view = memoryview(block)
        try:
            while view:
                view = view[self._spool.room.disk.write(self._descriptor, view) :]
        except OSError as error:
            # Half a block may be there: it would be taken for a torn tail, and the next one for damage.
            os.ftruncate(self._descriptor, self.segment.end)
            if error.errno not in FULL_ERRNOS:
                raise
            self._full = True
            return False
        self._full = False
        return True

    # ---------------------------------------------------------------- giving up

    def _give_up(self, which: dict[int, str], why: str) -> None:
        kept: list[_Pending] = []
        for item in self._pending:
            what = which.get(item[1])
            if what is None:
                kept.append(item)
                continue
            gap = self._gaps.setdefault(what, pb.Gap(what=what, why=why))
            gap.frames += 1
            gap.bytes += len(item[2])
            self._gap_boot_ns = item[0]
            self.given_up += 1
            self._pending_bytes -= len(item[2]) + 64
        self._pending = kept

    def _gap_due(self, short: str) -> bool:
        """While room stays short a gap is told every half minute, not every two seconds."""
        if self._full:
            return False
        return not short or self._gap_boot_ns - self._gap_written_ns > 30_000_000_000

    def _turn_gaps_into_frames(self) -> None:
        for gap in self._gaps.values():
            payload = gap.SerializeToString()
            self._pending.append((self._gap_boot_ns, FIELDS["gap"], payload))
            self._pending_bytes += len(payload) + 64
        self._gaps.clear()
        self._gap_written_ns = self._gap_boot_ns
