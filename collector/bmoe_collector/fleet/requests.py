"""What a drainer asks of a phone over one stream: where the database stands, then what was committed."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field

from bmoe_proto.v1 import telemetry_pb2 as pb


@dataclass(slots=True)
class Requests:
    """The asking side of a Follow call: an iterator that others put into."""

    waiting: queue.SimpleQueue[pb.FollowRequest | None] = field(default_factory=queue.SimpleQueue)

    def __iter__(self) -> Iterator[pb.FollowRequest]:
        while (request := self.waiting.get()) is not None:
            yield request

    def open(self, cursors: list[pb.Cursor], may_acknowledge: bool) -> None:
        """The first: where to go on, and whether what is committed may be deleted there."""
        opening = pb.FollowRequest.Open(may_acknowledge=may_acknowledge)
        getattr(opening, "from").extend(cursors)  # the field's name is a word of Python's
        self.waiting.put(pb.FollowRequest(open=opening))

    def acknowledge(self, cursor: pb.Cursor) -> None:
        """Everything before the cursor is committed."""
        self.waiting.put(pb.FollowRequest(acknowledge=cursor))

    def close(self) -> None:
        """Nothing more is asked."""
        self.waiting.put(None)
