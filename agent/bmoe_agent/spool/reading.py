"""Whole blocks out of a segment file, for whoever is served.

In: a segment as far as it is known, an offset, how much is wanted. Out: a `Chunk`: the bytes as they lie there, and where to go on.
"""

from __future__ import annotations

from dataclasses import dataclass

from bmoe_proto import framing

from bmoe_agent.spool import layout


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole blocks of one segment, from `offset` to `next_offset`.

    `finished`: the segment holds nothing behind them and never will. `damage`: what lies behind them is not a block.
    """

    run_id: bytes
    segment: bytes
    offset: int
    data: bytes
    next_offset: int
    finished: bool
    damage: str = ""


def read_blocks(run_id: bytes, place: layout.Segment, end: int, offset: int, max_bytes: int, *, live: bool) -> Chunk:
    """Whole blocks from `offset`, at least one if there is one, else at most `max_bytes`; nothing from `end` on.

    `live`: the segment is being written. An offset behind the end reads as nothing more. Raises OSError.
    """
    wanted = max(min(max(max_bytes, framing.HEADER_BYTES), end - offset), 0)
    data = layout.read_at(place.path, offset, wanted) if wanted else b""
    if data:
        length = framing.peek_length(data[: framing.HEADER_BYTES])
        if length is not None and len(data) < length <= end - offset:
            data = layout.read_at(place.path, offset, length)
    good, reason = framing.split_torn(data)
    at_end = offset + len(data) >= end
    cut_by_us = not at_end and good > 0
    damage = "" if good == len(data) or cut_by_us else reason
    next_offset = offset + good
    finished = not live and not damage and next_offset >= end
    return Chunk(run_id, place.segment, offset, data[:good], next_offset, finished, damage)
