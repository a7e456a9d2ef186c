"""Records of runs as a phone would have spooled them, made without an agent: frames, segments, blocks.

`Record` numbers frames, opens segments that name their predecessors, and cuts blocks; `whole()` is one run of an engine
whose stdout is given. `batches` is how a phone sends it: pieces of segment files with the cursor they begin at.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bmoe_proto import framing, sample_text
from bmoe_proto.v1 import telemetry_pb2 as pb

AGENT = bytes(range(16))
BOOT = "11111111-2222-3333-4444-555555555555"
STATUS = b"Name:\tbmoe-cli\nState:\tR (running)\nVmRSS:\t%d kB\nRssAnon:\t1024 kB\nRssFile:\t512 kB\nVmSwap:\t0 kB\nThreads:\t4\n"
STAT = (
    b"4242 (bmoe cli) R 1 4242 4242 0 -1 4194304 3196 0 5 0 %d 1 0 0 20 0 4 0 93911 24526848 4871 18446744073709551615"
    b" 1 1 0 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0\n"
)
MEMINFO = b"MemTotal:       24684084 kB\nMemFree:        23947968 kB\nMemAvailable:   24200676 kB\nSwapFree:  0 kB\n"


@dataclass
class Segment:
    """One segment file being made."""

    name: bytes
    frames: int = 0
    sha: object = field(default_factory=hashlib.sha256)
    data: bytearray = field(default_factory=bytearray)
    ends: list[int] = field(default_factory=list)
    pending: list[bytes] = field(default_factory=list)
    first_pending: int = 0


class Record:
    """One run's spool."""

    def __init__(self, run_id: bytes, seed: int = 0, per_block: int = 7) -> None:
        self.run_id = run_id
        self.random = random.Random(seed)
        self.per_block = per_block
        self.segments: list[Segment] = []
        self.boot_ns = 1_000_000_000
        self.streams: dict[int, bytearray] = {pb.STREAM_STDOUT: bytearray(), pb.STREAM_STDERR: bytearray()}
        self.open("start")

    def open(self, why: str = "restart") -> None:
        """Start a segment as a writer's start does."""
        opened = pb.SegmentOpened(agent_uuid=AGENT, boot_id=BOOT, pid=1, why=why, wall_ns=1_700_000_000_000_000_000)
        if self.segments:
            self.flush()
            last = self.segments[-1]
            opened.previous_segment = last.name
            opened.previous_frames = last.frames
            opened.previous_sha256 = last.sha.digest()
        self.segments.append(Segment(self.random.randbytes(16)))
        self.add(segment_opened=opened)

    def add(self, **what: object) -> None:
        """Append a frame; the keyword is the field of the oneof."""
        self.boot_ns += self.random.randrange(1, 50_000_000)
        here = self.segments[-1]
        frame = pb.Frame(run_id=self.run_id, segment=here.name, seq=here.frames, boot_ns=self.boot_ns, **what)
        self.raw(frame.SerializeToString())

    def raw(self, frame: bytes) -> None:
        """Append a serialised frame."""
        here = self.segments[-1]
        here.frames += 1
        here.sha.update(framing.join_frames([frame]))
        here.pending.append(frame)
        if len(here.pending) >= self.per_block:
            self.flush()

    def flush(self) -> None:
        """Write what waits as a block."""
        here = self.segments[-1]
        if here.pending:
            here.data += framing.encode_block(self.run_id, here.name, here.first_pending, here.pending)
            here.ends.append(len(here.data))
            here.first_pending += len(here.pending)
            here.pending.clear()

    def output(self, data: bytes, stream: int = pb.STREAM_STDOUT, piece: int = 900) -> None:
        """Append output frames of whole lines, about `piece` bytes each."""
        lines = data.splitlines(keepends=True)
        waiting = b""
        for line in [*lines, b""]:
            waiting += line
            if waiting and (len(waiting) >= piece or not line):
                offset = len(self.streams[stream])
                self.streams[stream] += waiting
                self.add(output=pb.Output(stream=stream, offset=offset, data=waiting, uncertainty_ns=250_000_000))
                waiting = b""

    def sample(self, kind: str = "fast", rss_kib: int = 19484) -> None:
        """Append a sample of a made-up engine."""
        entries = [
            sample_text.Entry("proc/engine/status", STATUS % rss_kib),
            sample_text.Entry("proc/engine/stat", STAT % (self.boot_ns // 10_000_000)),
            sample_text.Entry("proc/meminfo", MEMINFO),
            sample_text.Entry("proc/engine/io", None, errno=13),
        ]
        self.add(sample=pb.Sample(kind=kind, text=sample_text.encode(entries), took_ns=40_000, source="agent"))

    def end(self, **facts: object) -> None:
        """Append the last frame with true counts and hashes."""
        defaults: dict[str, object] = {
            "launched": True,
            "exit_observed": True,
            "exit_code": 0,
            "outcome": "ok",
            "cause": "tokens",
            "ended_by": "engine",
        }
        ended = pb.RunEnded(**{**defaults, **facts})
        for stream, size, sha in (
            (pb.STREAM_STDOUT, "stdout_bytes", "stdout_sha256"),
            (pb.STREAM_STDERR, "stderr_bytes", "stderr_sha256"),
        ):
            setattr(ended, size, len(self.streams[stream]))
            setattr(ended, sha, hashlib.sha256(self.streams[stream]).digest())
        for segment in self.segments:
            ended.segments.append(
                pb.SegmentCount(segment=segment.name, frames=segment.frames, sha256=segment.sha.digest())
            )
        ended.clock.CopyFrom(pb.ClockPair(boot_ns=self.boot_ns, wall_ns=1_700_000_100_000_000_000, boot_id=BOOT))
        self.add(run_ended=ended)
        self.flush()

    def batches(self, cuts: Sequence[int] | None = None) -> Iterator[tuple[pb.Cursor, bytes]]:
        """The segments in order, each in pieces of whole blocks (`cuts`: blocks a piece, cycled)."""
        sizes = list(cuts or [4])
        turn = 0
        for segment in self.segments:
            start, blocks = 0, list(segment.ends)
            while blocks:
                take = max(1, sizes[turn % len(sizes)])
                turn += 1
                end = blocks[:take][-1]
                blocks = blocks[take:]
                yield self.cursor(segment, start), bytes(segment.data[start:end])
                start = end

    def cursor(self, segment: Segment, offset: int) -> pb.Cursor:
        """A place in a segment."""
        return pb.Cursor(run_id=self.run_id, segment=segment.name, offset=offset)


def started(**more: object) -> pb.RunStarted:
    """A start with every fact filled in."""
    message = pb.RunStarted(
        plan_id="ab" * 16,
        plan_name="night",
        plan_sha256="cd" * 32,
        plan_text='name = "night"\n',
        plan_cells=1,
        attempt=1,
        argv=[b"/home/bmoe-cli", b"-m", b"/home/tiny.gguf", b"-p", b"Hi", b"-n", b"48"],
        environment={"HOME": "/home", "PATH": "/bin"},
        directory="/home/runs/1",
        clock=pb.ClockPair(
            boot_ns=1_000_000_000, wall_ns=1_700_000_000_000_000_000, uncertainty_ns=20_000, boot_id=BOOT
        ),
        cell=pb.Cell(name="base", index=0, model="tiny.gguf", prompt=b"Hi", n_predict=48, labels={"cache": "4"}),
        device=pb.DeviceFacts(
            agent_uuid=AGENT, name="shelf-1", properties={"ro.product.model": "Phone 9"}, page_bytes=4096
        ),
        engine=pb.EngineFacts(
            name="bmoe", path="/home/bmoe-cli", size=123, sha256="ef" * 32, version_text="bmoe-cli 0.19.0\n"
        ),
        model=pb.ModelFacts(
            name="tiny.gguf", size=2_000_000, identity="12" * 32, architecture="qwen3moe", dense_bytes=1, expert_bytes=2
        ),
    )
    for name, value in more.items():
        setattr(message, name, value)
    return message


def whole(
    run_id: bytes,
    stdout: bytes,
    stderr: bytes = b"",
    *,
    seed: int = 0,
    restarts: Sequence[float] = (),
    artifacts: Mapping[str, tuple[str, bytes]] | None = None,
    start: pb.RunStarted | None = None,
    **end: object,
) -> Record:
    """A run from start to end; `restarts`: places (0 to 1) in stdout where the agent was killed and started again."""
    record = Record(run_id, seed)
    record.add(run_started=start or started())
    record.sample("entry")
    record.add(
        gate=pb.GateReport(
            gate="mem_available_mib",
            asked="mem_available_mib >= 100",
            bound=100,
            last=900,
            unit="MiB",
            state="held",
            policy="skip",
        )
    )
    record.add(launched=pb.Launched(pid=4242, start_ticks=93911))
    record.output(stderr, pb.STREAM_STDERR)
    lines = stdout.splitlines(keepends=True)
    places = sorted(int(place * len(lines)) for place in restarts)
    before = 0
    for place in [*places, len(lines)]:
        part = b"".join(lines[before:place])
        half = len(part) // 2
        cut = part.rfind(b"\n", 0, half) + 1
        record.output(part[:cut])
        record.sample()
        record.add(
            residency=pb.Residency(
                method="sample",
                page_bytes=4096,
                took_ns=2_000_000,
                cpu_ns=1_000_000,
                parts=[
                    pb.ResidentPart(
                        part="whole",
                        bytes=2_000_000,
                        pages=489,
                        pages_looked_at=100,
                        pages_resident=50,
                        fraction=0.5,
                        standard_error=0.05,
                    ),
                    pb.ResidentPart(part="expert", bytes=1_000_000, pages=240),
                ],
            )
        )
        record.output(part[cut:])
        if place != len(lines):
            record.open()
            record.add(note=pb.Note(code="adopted", text="the engine was still running", facts_json='{"pid": 4242}'))
        before = place
    record.sample("exit")
    record.add(observer=pb.ObserverCost(cpu_ns=5_000_000, wakeups=10, samples=3, sampling_ns=120_000))
    files = [
        pb.ArtifactFacts(name=name, kind=kind, size=len(data), sha256=hashlib.sha256(data).digest())
        for name, (kind, data) in (artifacts or {}).items()
    ]
    record.end(artifacts=files, **end)
    return record


def progress(step: int, steps: int = 48, text: str = "x", **more: object) -> bytes:
    """A BMOE_PROGRESS line of the newest engine."""
    extra = "".join(f'"{key}":{value},' for key, value in more.items())
    return (
        f'BMOE_LOAD {{"mb":0.60,"ms":4.0}}\n'
        f'BMOE_PROGRESS {{"step":{step},"steps":{steps},"wall_ms":5.0,"io_ms":4.5,"compute_ms":0.3,"mgmt_ms":0.2,'
        f'"stall_ms":0.0,"read_mb":0.80,"cache_hit_pct":-1,"majflt":0,"cpu_ms":5.9,"dense_resident_frac":-1.000,'
        f'{extra}"delta_reasoning":"","delta_text":"{text}"}}\n'
    ).encode()


def oneshot(tokens: int = 48) -> bytes:
    """A one-shot's stdout with its report."""
    lines = b"".join(progress(step + 1, tokens) for step in range(tokens))
    return (
        lines + b"=== answer ===\n" + b"x" * tokens + b"\n=== perf ===\n"
        b"generation: %d tokens, 0.005 s/token (200.000 tok/s)\n"
        % tokens
        + b"compute: 42.8%% CPU occupancy (0.0011 cpu-s/token over 2 threads), 0.00 major faults/token\n".replace(
            b"%%", b"%"
        )
    )
