"""A recorded run, and phones that record it again: the same engine output, samples and file under ids and times of their own.

`record(folder)` runs the real agent with the stand-in engine once and leaves its home; `Recording` reads what the agent
spooled there. A `Phone` has a real spool and writes the recorded frames into it with the real writer, as they are due or as
fast as it goes. Each run differs from the others in a few digits (times of the first tokens), in its output and its file
alike, so that no store can keep two as one.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from bmoe_agent.serve.port import Measuring
from bmoe_agent.spool import FIELDS, RunWriter, Spool
from bmoe_agent.spool.writer import FLUSH_NS
from bmoe_proto.v1 import telemetry_pb2 as pb
from support.agent_records import cell, client, plan, state_of
from support.agents import Agent, make_engine, make_model, wait_for

TOKENS = 1024
ENGINE = "tok_s=15,load_s=1,prefill_s=1"  # with the flags below about 20 tokens a second
FLAGS = ["--moe-stream", "--cache-mb", "8", "--force-cache", "--overlap"]
DIGITS = 6
BETWEEN_NS = 1_000_000_000
"""From a run's end to the next one's beginning; its launch is some tenths later. Gates take longer, where there are any."""


def record(folder: Path) -> Path:
    """Run one cell of `TOKENS` tokens at default rates; the agent's home, whose spool holds it."""
    phone = Agent(folder / "home")
    model = make_model(folder / "models", size_mib=32)
    phone.init(make_engine(folder, ENGINE), model.parent, "phone")
    asked = plan([cell("base", n_predict=TOKENS, flags=FLAGS)])
    phone.start()
    try:
        with client(phone) as connected:
            refused = connected.submit(asked).refused
        if refused:
            raise RuntimeError("; ".join(refused))

        # no call disturbs the run
        def exited() -> bool:
            return any(path.read_bytes().startswith(b"exit") for path in phone.home.glob("spool/*/files/status"))

        wait_for(exited, "the engine's exit", 10 * TOKENS / 20)
        wait_for(lambda: state_of(phone, asked.plan_id) == "done", "the plan's end")
        phone.stop()
    finally:
        phone.destroy()
    return phone.home


class Recording:
    """One recorded run: its frames but for the ends, by when they were added."""

    def __init__(self, home: Path) -> None:
        spool = Spool(home / "spool", 1 << 30)
        (run_id,) = spool.runs()
        frames = list(spool.frames(run_id))
        self.csv = Path(spool.files_directory(run_id), "metrics.csv").read_bytes()
        began = frames[0].boot_ns
        self.length_ns = frames[-1].boot_ns - began
        self.started = next(frame.run_started for frame in frames if frame.WhichOneof("what") == "run_started")
        self.ended = frames[-1].run_ended
        self.steps: list[tuple[int, int, bytes]] = []  # ns after the first frame, field, message
        self.outputs: dict[int, pb.Output] = {}  # by their place in `steps`
        stdout = b""
        for frame in frames:
            what = frame.WhichOneof("what")
            if what in {"segment_opened", "run_started", "run_ended"}:
                continue
            if what == "output" and frame.output.stream == pb.STREAM_STDOUT:
                self.outputs[len(self.steps)] = frame.output
                stdout += frame.output.data
            said = getattr(frame, what).SerializeToString()
            self.steps.append((frame.boot_ns - began, FIELDS[what], said))
        self.stdout = stdout
        self.tokens = stdout.count(b"\nBMOE_PROGRESS ")
        times = [float(found) for found in re.findall(rb'"wall_ms":([\d.]+)', stdout)]
        self.tok_s = 1000 * len(times) / sum(times)
        self._in_stdout = [found.end() - 1 for found in re.finditer(rb'"wall_ms":[\d.]+', stdout)][:DIGITS]
        self._in_csv = [found.end() - 1 for found in re.finditer(rb"^\d+,\d+,[\d.]+", self.csv, re.MULTILINE)][:DIGITS]

    def variant(self, number: int) -> Variant:
        """The run once more, told apart by `number`."""
        digits = f"{number:0{DIGITS}d}".encode()
        stdout, csv = bytearray(self.stdout), bytearray(self.csv)
        for place, digit in zip(self._in_stdout, digits, strict=True):
            stdout[place] = digit
        for place, digit in zip(self._in_csv, digits, strict=True):
            csv[place] = digit
        changed: dict[int, bytes] = {}
        for at, output in self.outputs.items():
            if output.offset > self._in_stdout[-1]:
                break
            other = pb.Output()
            other.CopyFrom(output)
            other.data = bytes(stdout[output.offset : output.offset + len(output.data)])
            changed[at] = other.SerializeToString()
        return Variant(bytes(csv), hashlib.sha256(stdout).digest(), changed)


@dataclass(frozen=True, slots=True)
class Variant:
    """What one run has of its own."""

    csv: bytes
    stdout_sha256: bytes
    changed: dict[int, bytes]  # messages by their place in the recording's `steps`


@dataclass(slots=True)
class Lags:
    """Seconds until acknowledged: of blocks since they were on the phone's disk, of frames since they were made.

    An acknowledgement is sent after the commit and takes its way to the phone, so each is a little more than the time
    until committed.
    """

    since: float = math.inf  # of what was on the disk before that it is no measure
    blocks: list[float] = field(default_factory=list)
    frames: list[float] = field(default_factory=list)
    slips: list[float] = field(default_factory=list)  # how late the replay itself was
    first_read: float = 0.0
    last_acknowledged: float = 0.0

    def again(self, since: float = math.inf) -> None:
        """Forget what was measured; what is written from `since` on is measured."""
        self.since = since
        for found in (self.blocks, self.frames, self.slips):
            found.clear()
        self.first_read = self.last_acknowledged = 0.0


@dataclass(slots=True)
class _Sent:
    """What of a run waits to be acknowledged."""

    end: int = 0
    made: deque[float] = field(default_factory=deque)  # of frames in no block yet
    waiting: deque[tuple[int, float, list[float]]] = field(default_factory=deque)  # end of a block, when, its frames


class WatchedSpool(Spool):
    """A spool that notes when blocks are on disk and when they are acknowledged."""

    lags: Lags

    def watch(self, lags: Lags) -> None:
        self.lags = lags
        self._sent: dict[bytes, _Sent] = {}

    def made(self, run_id: bytes) -> None:
        """A frame is about to be added."""
        self._sent.setdefault(run_id, _Sent()).made.append(time.monotonic())

    def wrote(self, run_id: bytes, size: int) -> None:
        now = time.monotonic()
        sent = self._sent.setdefault(run_id, _Sent())
        sent.end += size
        frames = [sent.made.popleft() for _ in range(len(sent.made))]
        sent.waiting.append((sent.end, now, frames))
        super().wrote(run_id, size)

    def read(self, run_id: bytes, segment: bytes, offset: int, max_bytes: int = 1 << 20):
        if not self.lags.first_read:
            self.lags.first_read = time.monotonic()
        return super().read(run_id, segment, offset, max_bytes)

    def acknowledge(self, store_id: bytes, run_id: bytes, segment: bytes, offset: int) -> bool:
        now = self.lags.last_acknowledged = time.monotonic()
        sent = self._sent.get(run_id)
        while sent is not None and sent.waiting and sent.waiting[0][0] <= offset:
            _, at, frames = sent.waiting.popleft()
            if at >= self.lags.since:
                self.lags.blocks.append(now - at)
                self.lags.frames.extend(now - made for made in frames)
        return super().acknowledge(store_id, run_id, segment, offset)

    def overdue(self, since: float, now: float) -> None:
        """Count what was written since then and is not acknowledged, by how old it is."""
        for sent in list(self._sent.values()):
            for _, at, frames in list(sent.waiting):
                if at >= since:
                    self.lags.blocks.append(now - at)
                    self.lags.frames.extend(now - made for made in frames)

    def acknowledge_artifact(self, store_id: bytes, run_id: bytes, name: str, sha256: bytes) -> str:
        self.lags.last_acknowledged = time.monotonic()
        self._sent.pop(run_id, None)
        return super().acknowledge_artifact(store_id, run_id, name, sha256)


class Phone:
    """One phone: its spool, and the run it records at the moment."""

    def __init__(self, recording: Recording, root: Path, number: int, store_id: bytes, lags: Lags) -> None:
        self.number = number
        self.uuid = hashlib.sha256(b"phone %d" % number + os.fsencode(root)).digest()[:16]
        self.name = f"shelf-{number:02d}"
        self.measuring: Measuring | None = None
        self.now_ns: int | None = None  # the clock's time but for backlogs
        self.spool = WatchedSpool(
            root / f"{number}", 1 << 34, kept_for=store_id, low_water_bytes=0, boot_ns=self._boot_ns
        )
        self.spool.watch(lags)
        self.runs = 0
        self.plan_id = ""
        self._recording = recording
        self._writer: RunWriter | None = None
        self._variant: Variant
        self._at = 0
        self._began_ns = 0

    def _boot_ns(self) -> int:
        return self.now_ns or time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def begin(self, began_ns: int) -> None:
        """Begin a run whose first frame is of that boot time."""
        recording, run_id = self._recording, secrets.token_bytes(16)
        self._variant = recording.variant(self.number * 10_000 + self.runs)
        self._began_ns, self._at = began_ns, 0
        started = pb.RunStarted()
        started.CopyFrom(recording.started)
        started.plan_id, started.cell.index, started.cell.repeat = self.plan_id, self.runs, self.runs
        started.device.agent_uuid, started.device.name = self.uuid, self.name
        started.clock.boot_ns = began_ns
        started.clock.wall_ns = time.time_ns() - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - began_ns)
        self.spool.made(run_id)
        self._writer = self.spool.open_run(run_id)
        self.spool.made(run_id)
        self._writer.append("run_started", started, began_ns)
        self._writer.sync()
        Path(self.spool.files_directory(run_id), "metrics.csv").write_bytes(self._variant.csv)

    @property
    def busy(self) -> bool:
        """Whether a run is under way."""
        return self._writer is not None

    def due_ns(self) -> int:
        """When the next frame, or the end, is due."""
        steps = self._recording.steps
        after = steps[self._at][0] if self._at < len(steps) else self._recording.length_ns
        return self._began_ns + after

    def step(self) -> bool:
        """Add the next frame, or end the run (False)."""
        writer, steps = self._writer, self._recording.steps
        assert writer is not None
        due_ns = self.due_ns()
        if self._at == len(steps):
            self._end(writer, due_ns)
            return False
        _, number, said = steps[self._at]
        if number == FIELDS["launched"]:
            self.measuring = Measuring(writer.run_id)
        self.spool.made(writer.run_id)
        writer.append_encoded(number, self._variant.changed.get(self._at, said), due_ns)
        self._at += 1
        return True

    def finish(self) -> None:
        """The rest of the run at once, in the blocks that it would have had."""
        assert self._writer is not None
        flushed_ns = self.due_ns()
        while True:
            due_ns = self.due_ns()
            if due_ns - flushed_ns > 0.95 * FLUSH_NS:
                self._writer.flush()
                flushed_ns = due_ns
            if not self.step():
                return

    def whole(self, began_ns: int) -> int:
        """A whole run at once; when the next one may begin."""
        self.now_ns = began_ns
        self.begin(began_ns)
        self.finish()
        self.now_ns = None
        return began_ns + self._recording.length_ns + BETWEEN_NS

    def _end(self, writer: RunWriter, boot_ns: int) -> None:
        ended = pb.RunEnded()
        ended.CopyFrom(self._recording.ended)
        ended.stdout_sha256 = self._variant.stdout_sha256
        ended.artifacts[0].size = len(self._variant.csv)
        ended.artifacts[0].sha256 = hashlib.sha256(self._variant.csv).digest()
        self.spool.made(writer.run_id)
        writer.end(ended, boot_ns)
        self._writer = None
        self.measuring = None
        self.runs += 1

    def empty(self) -> bool:
        """Whether everything of the phone is acknowledged and deleted."""
        return not self.spool.runs()
