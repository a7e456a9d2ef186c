"""One reader's stream: when it is sent what, its acknowledgements, its heartbeats.

In: the reader's messages. Out: replies, serialised, until the reader goes or the agent stops. A reader that is slow or
gone blocks its own thread in gRPC's flow control and nothing else: one message is in flight, the rest is on disk.

Law 7: while a cell is measured, only its own frames, at most one message a second; the rest waits for the gap between
cells unless the plan or the reader says otherwise. While a gate probes the phone's speed, nothing but heartbeats.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from bmoe_proto.v1 import telemetry_pb2 as pb
from google.protobuf.message import DecodeError

from bmoe_agent.serve.feed import Feed
from bmoe_agent.serve.port import Measuring, Supervisor
from bmoe_agent.spool import Spool

HEARTBEAT_S = 5.0
QUIET_S = 1.0


class Follower:
    """One open stream."""

    def __init__(
        self,
        spool: Spool,
        supervisor: Supervisor,
        opened: pb.FollowRequest.Open,
        store_id: bytes,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._spool = spool
        self._supervisor = supervisor
        self._opened = opened
        self._store_id = store_id
        self._heartbeat_s = heartbeat_s
        self._quiet_s = quiet_s
        self._feed = Feed(spool, opened)
        self._gone = threading.Event()
        if self._may_acknowledge():
            # Where the store stands is committed there: an acknowledgement that was lost with a killed agent or a
            # broken link is never said again otherwise, and the run would be kept for ever.
            for cursor in getattr(opened, "from"):
                self._spool.acknowledge(store_id, cursor.run_id, cursor.segment, cursor.offset)

    def stop(self) -> None:
        """End the stream soon; from any thread."""
        self._gone.set()
        self._spool.wake()

    def take_acknowledgements(self, requests: Iterator[bytes]) -> None:
        """Take cursors until the reader says no more; a thread of its own, because gRPC's iterator blocks."""
        try:
            for data in requests:
                asked = pb.FollowRequest.FromString(data)
                if asked.WhichOneof("say") != "acknowledge" or not self._may_acknowledge():
                    continue
                cursor = asked.acknowledge
                self._spool.acknowledge(self._store_id, cursor.run_id, cursor.segment, cursor.offset)
        except DecodeError:
            self.stop()
        except Exception:  # gRPC raises a bare Exception when the call is over
            self._gone.set()

    def _may_acknowledge(self) -> bool:
        """Only the store records are kept for frees space; another one's word is not even noted."""
        return self._opened.may_acknowledge and bool(self._spool.kept_for) and self._spool.kept_for == self._store_id

    def replies(self) -> Iterator[bytes]:
        """What is sent, in order."""
        last_sent = last_beat = -1e9
        was_drained = False
        while not self._gone.is_set():
            generation = self._spool.generation
            measuring = self._supervisor.measuring()
            only = self._only(measuring)
            now = time.monotonic()
            if only is not None and now - last_sent < self._quiet_s:
                # The gap between two cells can be shorter than this: a run that begins wakes, and what the last one left goes.
                self._spool.wait(generation, self._quiet_s - (now - last_sent))
                continue
            reply = self._feed.next(only)
            if reply is not None:
                yield reply.SerializeToString()
                last_sent = time.monotonic()
                was_drained = False
                continue
            drained = not self._feed.waiting(only)
            if only is None:
                due = now - last_beat >= self._heartbeat_s or (drained and not was_drained)
            else:
                due = now - last_beat >= self._heartbeat_s - 2 * self._quiet_s
            if due:
                if measuring is None:
                    self._tidy()
                yield self._heartbeat(drained=drained).SerializeToString()
                last_beat = last_sent = time.monotonic()
                was_drained = drained
                continue
            self._spool.wait(self._feed.generation, max(self._heartbeat_s - (now - last_beat), 0.01))
        if self._supervisor.measuring() is None:
            self._tidy()

    def _only(self, measuring: Measuring | None) -> bytes | None:
        if measuring is None or measuring.send_during_cells or self._opened.everything:
            return None
        return measuring.run_id

    def _tidy(self) -> None:
        """Between cells: keep acknowledgements, delete what the store has."""
        self._spool.save_acknowledgements()
        self._spool.delete_acknowledged()

    def _heartbeat(self, *, drained: bool) -> pb.FollowReply:
        clock = self._supervisor.clock()
        beat = pb.FollowReply.Heartbeat(
            boot_ns=clock.boot_ns,
            backlog_bytes=self._spool.backlog_bytes(self._store_id),
            state=self._supervisor.state(),
            drained=drained,
        )
        return pb.FollowReply(heartbeat=beat)
