"""What an earlier writer of a run left: counted, hashed, and mended.

In: a run's directory. Out: the segments with what is whole in them, and gaps for what is not. A torn tail, which is what
a killed writer or a phone without power leaves, is cut at the last whole block. Anything else that is not a block is
damage: the file is kept aside as `.damaged`, its good beginning stays, and a `Gap` says what was lost.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent.spool import layout
from bmoe_agent.spool.layout import Inspection, Segment


@dataclass(slots=True)
class Predecessors:
    """A run's earlier segments, looked through."""

    directory: str
    segments: list[Segment] = field(default_factory=list)
    found: list[Inspection] = field(default_factory=list)
    gaps: list[pb.Gap] = field(default_factory=list)

    @property
    def counts(self) -> list[pb.SegmentCount]:
        """For RunEnded: what is whole in each."""
        return [
            pb.SegmentCount(segment=segment.segment, frames=found.frames, sha256=found.sha256)
            for segment, found in zip(self.segments, self.found, strict=True)
        ]

    @property
    def why(self) -> str:
        """SegmentOpened.why."""
        if not self.segments:
            return "start"
        return "damaged" if self.gaps else "restart"


def look_back(directory: str) -> Predecessors:
    """Look through every segment of a run; changes nothing."""
    past = Predecessors(directory, layout.list_segments(directory))
    past.found = [layout.inspect(segment.path) for segment in past.segments]
    for at, (segment, found) in enumerate(zip(past.segments, past.found, strict=True)):
        if not found.left_over or found.torn:
            continue
        gap = pb.Gap(what="segment", bytes=found.left_over, why=found.reason, lost_segment=segment.segment)
        # The segment after it says how many frames there were.
        if at + 1 < len(past.found) and past.found[at + 1].opened.previous_segment == segment.segment:
            gap.frames = max(past.found[at + 1].opened.previous_frames - found.frames, 0)
        past.gaps.append(gap)
    return past


def mend(past: Predecessors) -> None:
    """Cut what is behind the last whole block of each segment, keeping a damaged file aside first.

    At every moment in between the good blocks are in their segment. A file that cannot be kept aside, for want of room say, is
    left as it is, for the next start: what is behind its good blocks is not read meanwhile.
    """
    changed = False
    for segment, found in zip(past.segments, past.found, strict=True):
        segment.end = found.good_end
        if not found.left_over:
            continue
        if not found.torn:
            try:
                layout.copy_file(segment.path, segment.path.removesuffix(".seg") + ".damaged")
            except OSError:
                continue
        changed = True
        os.truncate(segment.path, found.good_end)
    if changed:
        layout.sync_directory(past.directory)
