"""The phone's record on disk: opens runs for writing, serves their bytes, takes acknowledgements, deletes.

In: frames through `RunWriter`, cursors and acknowledgements. Out: whole blocks exactly as they lie in the files,
summaries of runs. layout.py says what lies where. One process owns a spool; its threads share one `Spool`.

Lock order: a writer's lock may be held when the spool's is taken, never the other way round.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bmoe_proto import framing
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent.spool import acks as acks_file
from bmoe_agent.spool import index, layout
from bmoe_agent.spool.index import Run
from bmoe_agent.spool.layout import Segment, SpoolError
from bmoe_agent.spool.reading import Chunk, read_blocks
from bmoe_agent.spool.recovery import Predecessors, look_back, mend
from bmoe_agent.spool.room import Disk, Room
from bmoe_agent.spool.summary import RunSummary, read_ledger, write_ledger
from bmoe_agent.spool.writer import FLUSH_NS, RunWriter


@dataclass(frozen=True, slots=True)
class Who:
    """What a segment's first frame says about its writer."""

    agent_uuid: bytes = b""
    boot_id: str = ""
    agent_version: str = ""


def boot_now_ns() -> int:
    """CLOCK_BOOTTIME now."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Spool:
    """Everything recorded on this phone that its store has not committed yet."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        quota_bytes: int,
        *,
        who: Who | None = None,
        kept_for: bytes = b"",
        low_water_bytes: int | None = None,
        disk: Disk | None = None,
        boot_ns: Callable[[], int] = boot_now_ns,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Open the spool under `root`, made when missing; `kept_for` is the one store whose word frees space."""
        self.root = os.fspath(root)
        self.who = who or Who()
        self.kept_for = kept_for
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        self.room = Room(self.root, quota_bytes, disk=disk or Disk())
        if low_water_bytes is not None:
            self.room.low_water_bytes = low_water_bytes
        self.used_bytes = 0
        """Bytes of segments and of ended runs' files."""
        self.trouble = ""
        """Why the last write by the flusher failed, empty when it did not."""
        self._boot_ns, self._wall_ns = boot_ns, wall_ns
        self._opening_lock = threading.Lock()
        self._changed = threading.Condition()
        self._generation = 1
        self._runs: dict[bytes, Run] = {}
        self._flusher: threading.Thread | None = None
        self._stop = threading.Event()
        self._deleted = read_ledger(self.root)
        self._find_runs()
        self.room.keep_reserve()

    # ---------------------------------------------------------------- writing

    def open_run(self, run_id: bytes, *, why: str = "") -> RunWriter:
        """Begin a segment of a new or an existing run: the predecessor is counted and hashed, a torn tail cut.

        Its first frame, `SegmentOpened`, is added already (not flushed). Raises SpoolError when the run is open.
        """
        if len(run_id) != 16:
            raise ValueError("a run id is 16 bytes")
        with self._opening_lock:  # of two threads the later one is told that the run is open
            writer = self._open(run_id, why)
        self._start_flusher()
        return writer

    def _open(self, run_id: bytes, why: str) -> RunWriter:
        directory = os.path.join(self.root, run_id.hex())
        with self._changed:
            run = self._runs.get(run_id)
            if run is not None and run.writer is not None:
                raise SpoolError(f"run {run_id.hex()} is being written already")
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self.room.keep_reserve()
        past = look_back(directory)
        segment_id = secrets.token_bytes(16)
        ordinal = past.segments[-1].ordinal + 1 if past.segments else 0
        segment = Segment(ordinal, segment_id, os.path.join(directory, layout.segment_file_name(ordinal, segment_id)))
        writer = RunWriter(self, run_id, segment, past.counts, self._sealed)
        writer.append("segment_opened", self._opening(past, why), self._boot_ns())
        for gap in past.gaps:
            writer.append("gap", gap, self._boot_ns())
        if past.segments:
            try:
                # What replaces the cut bytes is durable before they are cut.
                writer.sync()
                mend(past)
            except BaseException:
                writer.abandon()
                raise
        with self._changed:
            if run is None:
                run = self._runs[run_id] = Run(directory, [], RunSummary(run_id), acks_file.load(directory))
            run.segments = [*past.segments, segment]
            run.writer = writer
            size = sum(item.end for item in run.segments)
            self.used_bytes += size - run.summary.bytes
            run.summary.bytes = size
            self._touch(run)
        return writer

    def files_directory(self, run_id: bytes) -> str:
        """Where the engine's files of a run belong, made when missing; deleted together with the run."""
        path = os.path.join(self.root, run_id.hex(), layout.FILES)
        os.makedirs(path, mode=0o700, exist_ok=True)
        return path

    def repair(self, run_id: bytes) -> None:
        """Put a damaged segment aside and record what was lost of it, in a segment of its own or by the open writer."""
        with self._changed:
            run = self._runs.get(run_id)
            if run is None or run.writer is not None:
                return  # a run being written is looked through when it is opened next
            said = index.end_of(run)
        writer = self.open_run(run_id, why="damaged")
        with self._changed:
            lost = said is not None and index.end_of(run) is None
        if said is not None and lost:
            # It lay behind the damage. Without it a store would wait for an end that was acknowledged and deleted.
            writer.end(said.run_ended, said.boot_ns)
        else:
            writer.seal()

    def close(self) -> None:
        """Seal what is open, keep the acknowledgements, stop the flusher."""
        self._stop.set()
        if self._flusher is not None:
            self._flusher.join()
        with self._changed:
            writers = [run.writer for run in self._runs.values() if run.writer is not None]
        for writer in writers:
            try:
                writer.seal()
            except (OSError, SpoolError) as error:
                self.trouble = str(error)  # what did not fit is missing; the next agent finds the rest and says so
        self.save_acknowledgements()

    def wrote(self, run_id: bytes, size: int) -> None:
        """Called by a writer after each block, so that readers wake."""
        with self._changed:
            run = self._runs.get(run_id)
            if run is not None and run.writer is not None:  # else it is being opened, and counted when it is open
                self.used_bytes += size
                run.summary.bytes += size
                if not run.summary.started:
                    index.learn_start(run)
                self._touch(run)

    def _opening(self, past: Predecessors, why: str) -> pb.SegmentOpened:
        opened = pb.SegmentOpened(
            agent_uuid=self.who.agent_uuid,
            boot_id=self.who.boot_id,
            wall_ns=self._wall_ns(),
            pid=os.getpid(),
            agent_version=self.who.agent_version,
            why=why or past.why,
        )
        if past.segments:
            last, found = past.segments[-1], past.found[-1]
            opened.previous_segment = last.segment
            opened.previous_frames = found.frames
            opened.previous_sha256 = found.sha256
            opened.previous_torn_bytes = found.left_over
        return opened

    def _sealed(self, writer: RunWriter) -> None:
        with self._changed:
            run = self._runs[writer.run_id]
            run.writer = None
            self.used_bytes += index.learn_end(run)
            self._touch(run)

    def _start_flusher(self) -> None:
        if self._flusher is None:
            self._flusher = threading.Thread(target=self._flush_now_and_then, name="spool-flusher", daemon=True)
            self._flusher.start()

    def _flush_now_and_then(self) -> None:
        while not self._stop.wait(FLUSH_NS / 1e9 * 0.95):
            with self._changed:
                writers = [run.writer for run in self._runs.values() if run.writer is not None]
            for writer in writers:
                try:
                    self.trouble = "" if writer.flush() else "the disk is full"
                except OSError as error:
                    self.trouble = str(error)

    # ---------------------------------------------------------------- reading

    def runs(self) -> list[bytes]:
        """The runs here, oldest first."""
        with self._changed:
            return list(self._runs)

    @property
    def generation(self) -> int:
        """Grows with every change: what `wait` waits for."""
        return self._generation

    def changed_since(self, generation: int) -> tuple[int, list[bytes]]:
        """The present generation, and the runs that changed after the given one (0: all)."""
        with self._changed:
            return self._generation, [run_id for run_id, run in self._runs.items() if run.changed > generation]

    def wait(self, generation: int, timeout_s: float) -> bool:
        """Wait until something changed after this generation; returns whether it did."""
        with self._changed:
            return self._changed.wait_for(lambda: self._generation != generation, timeout_s)

    def wake(self) -> None:
        """Make every waiting reader look again."""
        with self._changed:
            self._generation += 1
            self._changed.notify_all()

    def segments(self, run_id: bytes) -> list[bytes]:
        """The ids of a run's segments in order; none for an unknown run."""
        with self._changed:
            run = self._runs.get(run_id)
            return [segment.segment for segment in run.segments] if run else []

    def is_open(self, run_id: bytes) -> bool:
        """Whether a run is being written."""
        with self._changed:
            run = self._runs.get(run_id)
            return run is not None and run.writer is not None

    def artifacts(self, run_id: bytes) -> list[pb.ArtifactFacts]:
        """The files an ended run names."""
        with self._changed:
            run = self._runs.get(run_id)
            return list(run.artifacts) if run else []

    def read(self, run_id: bytes, segment: bytes, offset: int, max_bytes: int = 1 << 20) -> Chunk:
        """Whole blocks of a segment from `offset`, at least one if there is one, else at most `max_bytes`.

        An offset behind the end, as a store has that was served before the phone lost power, reads as nothing more.
        Raises KeyError for a run or segment that is not here, OSError for flash that cannot be read.
        """
        with self._changed:
            run = self._runs[run_id]
            place = next((item for item in run.segments if item.segment == segment), None)
            if place is None:
                raise KeyError(segment)
            live = run.writer is not None and run.writer.segment is place
            end = place.end
        return read_blocks(run_id, place, end, offset, max_bytes, live=live)

    def frames(self, run_id: bytes) -> Iterator[pb.Frame]:
        """Every readable frame of a run in order; what is pending in a writer is not among them."""
        for segment in self.segments(run_id):
            offset = 0
            while True:
                chunk = self.read(run_id, segment, offset)
                for block in framing.scan(chunk.data):
                    for frame in block.frames():
                        yield pb.Frame.FromString(frame)
                if chunk.next_offset == offset:
                    break
                offset = chunk.next_offset

    def summaries(self) -> list[RunSummary]:
        """Every run ever kept here, the deleted ones first: a plan's state."""
        with self._changed:
            return [*self._deleted, *(run.summary for run in self._runs.values())]

    def summary(self, run_id: bytes) -> RunSummary | None:
        """One run's summary, deleted or not."""
        return next((found for found in self.summaries() if found.run_id == run_id), None)

    def acknowledged(self, run_id: bytes) -> bool:
        """Whether the store this phone keeps records for has all of a run: every segment and every file."""
        with self._changed:
            run = self._runs.get(run_id)
            return run is not None and self._is_acknowledged(run)

    def backlog_bytes(self, store_id: bytes | None = None) -> int:
        """Bytes of segments that a store (the one records are kept for, unless told) has not acknowledged."""
        store = self.kept_for if store_id is None else store_id
        total = 0
        with self._changed:
            for run in self._runs.values():
                known = run.acks.stores.get(store)
                for segment in run.segments:
                    total += max(segment.end - (known.segments.get(segment.segment, 0) if known else 0), 0)
        return total

    # ---------------------------------------------------------------- acknowledging and deleting

    def acknowledge(self, store_id: bytes, run_id: bytes, segment: bytes, offset: int) -> bool:
        """A store has committed everything before `offset`; returns False for a run or segment that is not here."""
        with self._changed:
            run = self._runs.get(run_id)
            if run is None or all(item.segment != segment for item in run.segments):
                return False
            run.acks.cursor(store_id, segment, offset)
            return True

    def acknowledge_artifact(self, store_id: bytes, run_id: bytes, name: str, sha256: bytes) -> str:
        """A store holds a file with this hash; returns why that was not accepted, empty when it was."""
        with self._changed:
            run = self._runs.get(run_id)
            facts = next((item for item in run.artifacts if item.name == name), None) if run else None
            if run is None or facts is None:
                return f"no file {name!r} of run {run_id.hex()} here"
            if facts.sha256 != sha256:
                return f"{name}: the hash is {facts.sha256.hex()}, not {sha256.hex()}: fetch it again"
            run.acks.artifact(store_id, name, sha256)
            return ""

    def save_acknowledgements(self) -> None:
        """Write acknowledgements to their files (not synced: losing one means sending something again)."""
        with self._changed:
            dirty = [run.acks for run in self._runs.values() if run.acks.dirty]
            for acks in dirty:
                try:
                    acks.save(durable=False)
                except OSError as error:
                    self.trouble = str(error)

    def delete_acknowledged(self) -> list[bytes]:
        """Delete every ended run of which the store has everything; returns which. Each leaves a line in the ledger."""
        with self._changed:
            done = [(run_id, run) for run_id, run in self._runs.items() if self._is_acknowledged(run)]
            if not done:
                return []
            if not self._note_deletion([run.summary for _, run in done]):
                return []
            for run_id, run in done:
                del self._runs[run_id]
                self._deleted.append(run.summary)
                self.used_bytes -= run.summary.bytes + run.file_bytes
                shutil.rmtree(run.directory, ignore_errors=True)
        self.room.keep_reserve()
        return [run_id for run_id, _ in done]

    def drop_unbegun(self) -> None:
        """Remove runs that an agent was killed before the start of: for who owns the spool, before it opens any."""
        with self._changed:
            for run_id, run in list(self._runs.items()):
                if index.never_began(run):
                    del self._runs[run_id]
                    shutil.rmtree(run.directory, ignore_errors=True)

    def _note_deletion(self, summaries: list[RunSummary]) -> bool:
        """Put runs into the ledger; on a disk so full that not even this fits, the reserve makes room and is made again."""
        for _ in range(2):
            try:
                write_ledger(self.root, summaries)
                for summary in summaries:
                    summary.deleted = True
                return True
            except OSError as error:
                self.trouble = str(error)
                if not self.room.give_reserve():
                    break
        return False

    def _is_acknowledged(self, run: Run) -> bool:
        if run.writer is not None or not run.summary.ended or not self.kept_for:
            return False
        known = run.acks.stores.get(self.kept_for)
        if known is None:
            return False
        return all(known.segments.get(item.segment, 0) >= item.end for item in run.segments) and all(
            known.artifacts.get(item.name) == item.sha256 for item in run.artifacts if item.sha256
        )

    # ---------------------------------------------------------------- finding

    def _touch(self, run: Run) -> None:
        self._generation += 1
        run.changed = self._generation
        self._changed.notify_all()

    def _find_runs(self) -> None:
        for run in index.find(self.root, {summary.run_id for summary in self._deleted}):
            run.changed = self._generation
            self._runs[run.summary.run_id] = run
            self.used_bytes += run.summary.bytes + run.file_bytes
