"""What is known of each run in memory, and how it is learnt from its files when an agent starts.

In: a spool's folder. Out: `Run`s. Only the first blocks and the last one of a run are decompressed: a backlog of a night is
thousands of blocks, and an agent must be serving within a second.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass, field

from bmoe_proto import framing
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent.spool import acks as acks_file
from bmoe_agent.spool import layout
from bmoe_agent.spool.layout import Segment
from bmoe_agent.spool.summary import RunSummary
from bmoe_agent.spool.writer import RunWriter

log = logging.getLogger("bmoe_agent")

_BLOCKS_BEFORE_START = 8
_BEFORE_START = frozenset({"segment_opened", "gap"})


@dataclass(slots=True)
class Run:
    """One run's directory."""

    directory: str
    segments: list[Segment]
    summary: RunSummary
    acks: acks_file.Acks
    artifacts: list[pb.ArtifactFacts] = field(default_factory=list)
    writer: RunWriter | None = None
    changed: int = 0  # the spool's generation when it changed last
    file_bytes: int = 0  # of the engine's own files, once it ended


def find(root: str, deleted: Collection[bytes]) -> list[Run]:
    """Every run under `root`, oldest first; what was to be deleted when the agent was killed is deleted now."""
    found: list[Run] = []
    for name in os.listdir(root):
        directory = os.path.join(root, name)
        if not layout.RUN_NAME.match(name) or not os.path.isdir(directory):
            continue
        run_id = bytes.fromhex(name)
        if run_id in deleted:
            shutil.rmtree(directory, ignore_errors=True)
            continue
        try:
            run = Run(directory, layout.list_segments(directory), RunSummary(run_id), acks_file.load(directory))
            run.summary.bytes = sum(segment.end for segment in run.segments)
            learn_start(run)
            learn_end(run)
        except OSError as error:
            # Flash that cannot be read any more, say: it must not keep the rest of the record from its store.
            log.error("%s: %s: this run is left as it is", directory, error)
            continue
        found.append(run)
    found.sort(key=lambda run: (run.summary.started_wall_ns, run.summary.run_id))
    return found


def never_began(run: Run) -> bool:
    """An agent was killed between a run's directory and its start: nothing was recorded, and nothing launched (law 4)."""
    nothing = not any(segment.end for segment in run.segments) and not size_of_files(run.directory)
    return nothing and run.writer is None


def learn_start(run: Run) -> None:
    """RunStarted comes before all but SegmentOpened and Gaps, in the first segment that has it.

    Usually it is in that segment's first block, but the flusher can have written what came before it by itself.
    """
    for segment in run.segments:
        offset: int | None = 0
        for _ in range(_BLOCKS_BEFORE_START):
            frames = block_frames(segment, offset) if offset is not None else []
            for frame in frames:
                run.summary.take(frame)
            if run.summary.started:
                return
            if not frames or not all(frame.WhichOneof("what") in _BEFORE_START for frame in frames):
                break
            offset = layout.next_block_offset(segment.path, offset or 0)


def learn_end(run: Run) -> int:
    """RunEnded is in the last block of the last segment, but for those of repairs; returns the growth of its files."""
    if not run.summary.started:
        learn_start(run)
    frame = end_of(run)
    if frame is not None:
        run.summary.take(frame)
        run.artifacts = list(frame.run_ended.artifacts)
    if not run.summary.ended:
        return 0
    before, run.file_bytes = run.file_bytes, size_of_files(os.path.join(run.directory, layout.FILES))
    return run.file_bytes - before


def end_of(run: Run) -> pb.Frame | None:
    """The frame that holds a run's RunEnded, None when there is none (any more)."""
    for segment in reversed(run.segments):
        offset = layout.last_block_offset(segment.path, segment.end)
        for frame in block_frames(segment, offset) if offset is not None else ():
            if frame.WhichOneof("what") == "run_ended":
                return frame
    return None


def block_frames(segment: Segment, offset: int) -> list[pb.Frame]:
    """The frames of the block at `offset`; none when there is no whole one."""
    length = framing.peek_length(layout.read_at(segment.path, offset, framing.HEADER_BYTES))
    if length is None:
        return []
    try:
        block = framing.read_block(layout.read_at(segment.path, offset, length))
        return [pb.Frame.FromString(frame) for frame in block.frames()]
    except framing.FramingError:
        return []


def size_of_files(directory: str) -> int:
    """Bytes of all files under a directory."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total
