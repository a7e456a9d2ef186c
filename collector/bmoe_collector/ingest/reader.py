"""Frames of one run, in order, to rows: the live parser of a record.

In: frames as they were spooled. Out: rows in the reader's `sink` and column changes for its row of `runs`. The same
frames always give the same rows (law 1); a reader that was lost is made again by reading the stored blocks once more.
A frame that cannot be read, or is of a kind not known here, is kept whole and never stops the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from bmoe_proto import framing, kernel
from bmoe_proto.v1 import telemetry_pb2 as pb
from google.protobuf.message import DecodeError

from bmoe_collector.ingest import told
from bmoe_collector.ingest.sink import SAMPLE, Sink
from bmoe_collector.ingest.stdout_rows import Request, StdoutRows
from bmoe_collector.store.engine import to_json, view

TAIL = 16 << 10
WHOLE = 8 << 20
_FREQUENT = frozenset({"output", "sample"})
STREAMS = {pb.STREAM_STDOUT: "stdout", pb.STREAM_STDERR: "stderr", pb.STREAM_STDIN: "stdin"}


@dataclass(slots=True)
class Stream:
    """A stream of the engine, as far as it has come."""

    offset: int = 0
    sha: Any = field(default_factory=hashlib.sha256)
    tail: bytes = b""
    whole: bytearray | None = field(default_factory=bytearray)
    """All of it, as long as it is short: an ended run's streams become files without reading the record again."""

    def take(self, data: bytes) -> None:
        """Append."""
        self.sha.update(data)
        if self.whole is not None:
            self.whole += data
            if len(self.whole) > WHOLE:
                self.whole = None


@dataclass(slots=True)
class Segment:
    """A writer's start: how many frames of it are here, and the rolling hash over them."""

    segment: str
    previous: str | None = None
    frames: int = 0
    sha: Any = field(default_factory=hashlib.sha256)
    opened: dict[str, Any] | None = None
    problem: str | None = None


class RunReader:
    """One run's record being read."""

    def __init__(self, run_no: int, run_id: str) -> None:
        self.run_no = run_no
        self.run_id = run_id
        self.sink = Sink(run_no)
        self.stdout = StdoutRows(self.sink)
        self.streams = {number: Stream() for number in STREAMS}
        self.segments: dict[str, Segment] = {}
        self.offsets: dict[str, int] = {}
        self.changes: dict[str, Any] = {}
        self.plan: dict[str, Any] | None = None
        self.labels: dict[str, str] = {}
        self.device: dict[str, Any] | None = None
        self.started: pb.RunStarted | None = None
        self.ended: pb.RunEnded | None = None
        self.ended_boot_ns = 0
        self.ended_segment = ""
        self.ended_seq = 0
        self.ended_own: bytes | None = None
        self.watchdog: pb.WatchdogReport | None = None
        self.gave_up: pb.GateReport | None = None
        self.launch_error = ""
        self.kill_evidence: list[str] = []
        self.notes: set[str] = set()
        self.gaps = 0
        self.disordered = False
        self.problems: list[str] = []
        self._handlers: dict[str, Callable[[Any, int, Segment, int], None]] = {
            "output": self._output,
            "sample": self._sample,
            "residency": self._residency,
            "gate": self._gate,
            "watchdog": self._watchdog,
            "turn": self._turn,
            "note": self._note,
            "observer": self._observer,
            "gap": self._gap,
            "launched": self._launched,
            "run_started": self._run_started,
            "run_ended": self._run_ended,
            "segment_opened": self._segment_opened,
        }

    @property
    def held_bytes(self) -> int:
        """Bytes of output that are kept in memory."""
        return sum(len(stream.whole) for stream in self.streams.values() if stream.whole is not None)

    def block(self, segment_id: str, first_seq: int, frames: list[bytes], raw: bytes) -> None:
        """Read a block's frames; `raw` is the payload that holds them (what the segment's hash is over)."""
        segment = self.segments.get(segment_id)
        if segment is None:
            segment = self.segments[segment_id] = Segment(segment_id)
        skip = segment.frames - first_seq
        if skip:
            raw = self._misplaced(segment, first_seq, frames, skip)
        frames = frames[max(skip, 0) :]
        seq = first = max(first_seq, segment.frames)
        for frame in frames:
            self._frame(segment, seq, frame)
            seq += 1
        if self.ended_own is None and self.ended is not None:
            # What RunEnded counts of its own segment is what came before it.
            before = segment.sha.copy()
            before.update(framing.join_frames(frames[: self.ended_seq - first]))
            self.ended_own = before.digest()
        segment.frames = max(segment.frames, seq)
        segment.sha.update(raw)

    def _misplaced(self, segment: Segment, first_seq: int, frames: list[bytes], skip: int) -> bytes:
        """Frames that do not follow the ones before: some are missing, or some are here already (law 3)."""
        if skip < 0:
            segment.problem = f"frames {segment.frames} to {first_seq - 1} never came"
            self._undeclared_gap("segment", -skip, 0, segment.problem, segment.segment)
        else:
            segment.problem = f"frames {first_seq} to {first_seq + min(skip, len(frames)) - 1} came twice"
        return framing.join_frames(frames[max(skip, 0) :])

    def _undeclared_gap(self, what: str, frames: int | None, size: int | None, why: str, lost: str | None) -> None:
        self.gaps += 1
        self.sink.add("gaps", 0, what, frames, size, why, lost, False)

    def _frame(self, segment: Segment, seq: int, raw: bytes) -> None:
        try:
            frame = pb.Frame.FromString(raw)
        except DecodeError:
            self.sink.add("unknown_frames", segment.segment, seq, 0, raw)
            self.problems.append(f"frame {seq} of segment {segment.segment[:8]} is no frame; kept")
            return
        kind = frame.WhichOneof("what")
        if kind is None:
            self.sink.add("unknown_frames", segment.segment, seq, _boot(frame), raw)
            return
        said = getattr(frame, kind)
        if kind not in _FREQUENT:  # those have a look at their own texts
            told.without_nul(said)
        self._handlers[kind](said, _boot(frame), segment, seq)

    def _segment_opened(self, opened: pb.SegmentOpened, _boot_ns: int, segment: Segment, _seq: int) -> None:
        segment.opened = told.message(opened)
        segment.previous = opened.previous_segment.hex()[:32] or None

    def _run_started(self, started: pb.RunStarted, boot_ns: int, _segment: Segment, _seq: int) -> None:
        if self.started is not None:
            self.problems.append("a second start of the run in its record; the first stands")
            return
        self.started = started
        self.changes.update(told.started(started, boot_ns))
        self.plan = told.plan(started)
        self.device = told.message(started.device)
        self.labels = {view(key): view(value) for key, value in started.cell.labels.items()}

    def _launched(self, launched: pb.Launched, boot_ns: int, _segment: Segment, _seq: int) -> None:
        self.changes["launched"] = True
        if not launched.adopted:
            self.changes["launched_boot_ns"] = boot_ns
        text = f"pid {launched.pid}{', adopted' if launched.adopted else ''}"
        self.sink.add("notes", boot_ns, "agent", "launched", text, to_json(told.message(launched)))

    def _output(self, output: pb.Output, boot_ns: int, _segment: Segment, _seq: int) -> None:
        stream = self.streams.get(output.stream)
        if stream is None:
            self.problems.append(f"output of stream {output.stream}, which is not known here")
            return
        data = output.data
        if output.offset != stream.offset:
            if output.offset > stream.offset:
                name = STREAMS[output.stream]
                why = f"{name}: bytes {stream.offset} to {output.offset - 1} never came"
                self._undeclared_gap("output", None, told.signed(output.offset - stream.offset), why, None)
                if output.stream == pb.STREAM_STDOUT:
                    self.stdout.feed(b"\n")  # what comes is not the end of the line that was cut
            else:  # a tail that began again reads what it had told already
                data = data[stream.offset - output.offset :]
        if not data:
            return
        stream.offset = max(stream.offset, output.offset + len(output.data))
        stream.take(data)
        if output.stream == pb.STREAM_STDOUT:
            self.stdout.feed(data, boot_ns, min(output.uncertainty_ns, (1 << 63) - 1))
        else:
            stream.tail = (stream.tail + data)[-TAIL:]

    def _sample(self, sample: pb.Sample, boot_ns: int, segment: Segment, seq: int) -> None:
        found = kernel.sample_values(sample.text)
        values = found.values
        row, _ = SAMPLE.split(values)
        if found.problem:
            values["problem"] = found.problem
        self.sink.add(
            "samples",
            boot_ns,
            view(sample.source)[:8] or "agent",
            view(sample.kind)[:12],
            sample.took_ns / 1e6 if sample.took_ns else None,
            segment.segment,
            seq,
            *row,
            to_json(values),
            _refusals(tuple(found.refused.items())) if found.refused else None,
        )

    def _residency(self, look: pb.Residency, boot_ns: int, _segment: Segment, _seq: int) -> None:
        cost, cpu = look.took_ns / 1e6, look.cpu_ns / 1e6
        head = (look.method[:16], view(look.problem))
        if not look.parts:
            self.sink.add("residency", boot_ns, "whole", *head, *(None,) * 6, cost, cpu)
        for part in look.parts:
            seen = part.pages_looked_at > 0
            self.sink.add(
                "residency",
                boot_ns,
                part.part[:32],
                *head,
                told.signed(part.bytes),
                told.signed(part.pages),
                told.signed(part.pages_looked_at),
                told.signed(part.pages_resident) if seen else None,
                part.fraction if seen else None,
                part.standard_error if seen else None,
                cost,
                cpu,
            )

    def _gate(self, gate: pb.GateReport, boot_ns: int, _segment: Segment, _seq: int) -> None:
        if gate.state in {"gave_up", "unreadable"} and gate.policy != "run-flagged":
            self.gave_up = gate
        readings = [told.message(reading) for reading in gate.readings]
        self.sink.add(
            "gates",
            boot_ns,
            view(gate.gate),
            view(gate.asked),
            gate.bound if gate.HasField("bound") else None,
            gate.last if gate.HasField("last") else None,
            view(gate.unit),
            gate.state[:16],
            gate.waited_ns / 1e9,
            gate.policy[:16],
            (gate.source or "agent")[:16],
            to_json(readings),
        )

    def _watchdog(self, report: pb.WatchdogReport, boot_ns: int, _segment: Segment, _seq: int) -> None:
        self.watchdog = report
        text = f"{report.rule}: {report.seen:g} {report.unit} beyond {report.bound:g}: {report.action}"
        self.sink.add("notes", boot_ns, "agent", "watchdog", view(text), to_json(told.message(report)))

    def _turn(self, turn: pb.TurnReport, boot_ns: int, _segment: Segment, _seq: int) -> None:
        known = self.stdout.requests.get(turn.request_id)
        if known is None:
            known = self.stdout.requests[turn.request_id] = Request(turn.index, None, turn.state)
        known.state = turn.state
        if turn.request:
            known.request = _request(turn.request)
        if turn.detail:
            known.detail = turn.detail
        facts = told.message(turn)
        self.sink.add(
            "notes", boot_ns, "agent", "turn", view(f"{turn.index} {turn.state} {turn.detail}"), to_json(facts)
        )

    def _note(self, note: pb.Note, boot_ns: int, _segment: Segment, _seq: int) -> None:
        facts = told.facts(note.facts_json)
        self.notes.add(note.code)
        if note.code == "not_launched":
            self.launch_error = view(note.text)
        if note.code == "kill_evidence":
            self.kill_evidence.append(view(note.text))
        source = str(facts.get("source") or "agent")[:16]
        self.sink.add("notes", boot_ns, source, view(note.code), view(note.text), to_json(facts))

    def _observer(self, cost: pb.ObserverCost, _boot_ns: int, _segment: Segment, _seq: int) -> None:
        self.changes["observer"] = told.observer(cost)

    def _gap(self, gap: pb.Gap, boot_ns: int, _segment: Segment, _seq: int) -> None:
        self.gaps += 1
        frames, size = told.signed(gap.frames), told.signed(gap.bytes)
        self.sink.add(
            "gaps", boot_ns, view(gap.what), frames, size, view(gap.why), gap.lost_segment.hex()[:32] or None, True
        )

    def _run_ended(self, ended: pb.RunEnded, boot_ns: int, segment: Segment, seq: int) -> None:
        self.ended = ended
        self.ended_boot_ns = boot_ns
        self.ended_segment = segment.segment
        self.ended_seq = seq
        self.ended_own = None
        self.stdout.close()
        if ended.HasField("observer"):
            self.changes["observer"] = told.observer(ended.observer)


@lru_cache(maxsize=256)
def _refusals(reasons: tuple[tuple[str, str], ...]) -> str:
    """What a sample could not read is the same at every sample."""
    return to_json(dict(reasons))


def _boot(frame: pb.Frame) -> int:
    return min(frame.boot_ns, (1 << 63) - 1)


def _request(line: bytes) -> Any:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {"text": view(line)}
    return found if isinstance(found, dict) and told.shallow(found) else {"text": view(line)}
