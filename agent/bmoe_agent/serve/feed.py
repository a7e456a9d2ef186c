"""What one reader is sent next, and in which order.

In: the spool and where the reader's store stands. Out: batches of whole blocks, and word of runs that ended. No clock
and no network: follow.py decides when to ask.

The open run comes first, then the others, oldest first; in a run its segments in order. A segment that is damaged is
repaired when its run is closed, and its later segments are sent in any case.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent.spool import Chunk, Spool, SpoolError

log = logging.getLogger("bmoe_agent")

DEFAULT_BATCH_BYTES = 1 << 20
MAX_BATCH_BYTES = 8 << 20


class Feed:
    """One reader's place in the record."""

    def __init__(self, spool: Spool, opened: pb.FollowRequest.Open) -> None:
        """`opened` is the reader's first message: cursors, `live_only`, the size of a batch."""
        self._spool = spool
        self._offsets: dict[tuple[bytes, bytes], int] = {}
        cursors: Iterable[pb.Cursor] = getattr(opened, "from")
        for cursor in cursors:
            self._offsets[cursor.run_id, cursor.segment] = cursor.offset
        self._max_bytes = min(opened.max_batch_bytes or DEFAULT_BATCH_BYTES, MAX_BATCH_BYTES)
        self._generation = 0
        self._active: dict[bytes, None] = {}
        self._finished: set[tuple[bytes, bytes]] = set()
        self._told: dict[bytes, int] = {}  # ended runs told of, with how many segments they had
        self._mending: set[tuple[bytes, bytes]] = set()  # damage that was reported once
        self._skip: set[bytes] = set()
        if opened.live_only:
            self._skip = {run_id for run_id in spool.runs() if not spool.is_open(run_id)}

    @property
    def generation(self) -> int:
        """The state of the spool that the last `next` saw: wait for another one."""
        return self._generation

    def next(self, only: bytes | None = None) -> pb.FollowReply | None:
        """The next message, or None when there is nothing now; `only` holds everything but one run back (law 7)."""
        self._generation, changed = self._spool.changed_since(self._generation)
        for run_id in changed:
            if run_id not in self._skip or self._spool.is_open(run_id):
                self._skip.discard(run_id)
                self._active.setdefault(run_id)
        if only is not None:
            return self._of_run(only) if only in self._active else None
        for run_id in sorted(self._active, key=lambda run_id: not self._spool.is_open(run_id)):
            reply = self._of_run(run_id)
            if reply is not None:
                return reply
        return None

    def waiting(self, only: bytes | None) -> bool:
        """Whether something is held back because of `only`."""
        return only is not None and any(run_id != only for run_id in self._active)

    def _of_run(self, run_id: bytes) -> pb.FollowReply | None:
        # Asked before the segments are read: a run that is sealed in between is looked at once more.
        was_open = self._spool.is_open(run_id)
        try:
            for segment in self._spool.segments(run_id):
                chunk = self._read(run_id, segment)
                if chunk is not None and chunk.data:
                    return _batch(chunk)
        except KeyError:
            pass  # acknowledged by another reader of the same store and deleted
        if was_open:
            return None
        self._active.pop(run_id, None)
        return self._ended(run_id)

    def _read(self, run_id: bytes, segment: bytes) -> Chunk | None:
        key = (run_id, segment)
        if key in self._finished:
            return None
        try:
            chunk = self._spool.read(run_id, segment, self._offsets.get(key, 0), self._max_bytes)
        except OSError as error:
            # Flash that cannot be read any more: what there is of the others still comes, and what is missing is seen there.
            self._spool.trouble = f"segment {segment.hex()} of run {run_id.hex()}: {error.strerror}"
            log.error("%s", self._spool.trouble)
            self._finished.add(key)
            return None
        if chunk.damage and not chunk.data:
            self._mend(key)
        self._offsets[key] = max(chunk.next_offset, self._offsets.get(key, 0))
        if chunk.finished:
            self._finished.add(key)
        return chunk

    def _mend(self, key: tuple[bytes, bytes]) -> None:
        """Once: a repair that failed, for want of space say, must not be tried for ever."""
        if key in self._mending:
            return
        self._mending.add(key)
        try:
            self._spool.repair(key[0])  # its gap comes as a segment of its own
        except (SpoolError, OSError) as error:
            self._spool.trouble = str(error)

    def _ended(self, run_id: bytes) -> pb.FollowReply | None:
        summary = self._spool.summary(run_id)
        segments = len(self._spool.segments(run_id))
        if summary is None or not summary.ended or summary.deleted or self._told.get(run_id) == segments:
            return None
        self._told[run_id] = segments
        ended = pb.FollowReply.Ended(run_id=run_id, artifacts=self._spool.artifacts(run_id))
        return pb.FollowReply(ended=ended)


def _batch(chunk: Chunk) -> pb.FollowReply:
    at = pb.Cursor(run_id=chunk.run_id, segment=chunk.segment, offset=chunk.offset)
    return pb.FollowReply(batch=pb.FollowReply.Batch(at=at, blocks=chunk.data))
