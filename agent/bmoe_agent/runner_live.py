"""The state of one attempt of one cell while it lives, and the frames every part of the runner writes.

In: the shared context, the cell, an open run. Out: `Live`, which preparing, watching, adopting and closing work on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any

from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent.context import Context
from bmoe_agent.launch import ExitStatus, Process
from bmoe_agent.launch_argv import Command
from bmoe_agent.oomkills import Kills
from bmoe_agent.phase import Phases
from bmoe_agent.residency.look import Residency
from bmoe_agent.sampling import Observer, Sampler
from bmoe_agent.session import Report, Session
from bmoe_agent.spool import RunWriter
from bmoe_agent.tail import Chunk, Tail

log = logging.getLogger("bmoe_agent")

STDERR_KEPT_BYTES = 16 << 10
SAMPLE_FIELD = pb.Frame.DESCRIPTOR.fields_by_name["sample"].number


class AgentStopping(Exception):  # noqa: N818 - a state, not an error
    """The agent was told to stop; the engine goes on and the next agent adopts it."""


class CellCancelled(Exception):  # noqa: N818 - a state, not an error
    """The user cancelled this cell or its plan before anything was launched."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What the night needs to know of an ended attempt."""

    run_id: bytes
    outcome: str
    cause: str
    retryable: bool
    launched: bool
    gate_policy: str = ""  # "abort" when a gate with that policy gave up


@dataclass(slots=True)
class Live:
    """One attempt. The order of fields is the order in which they come to be."""

    context: Context
    plan_id: str
    cell: pb.Cell
    attempt: int
    run_id: bytes
    writer: RunWriter
    directory: Path
    cancelled: Callable[[], str]  # why the user wants this cell to end; empty while nobody does
    observer: Observer
    limits: pb.Limits = field(default_factory=pb.Limits)
    sampling: pb.Sampling = field(default_factory=pb.Sampling)
    model: pb.ModelFacts = field(default_factory=pb.ModelFacts)  # as it was when the run started
    command: Command = field(default_factory=lambda: Command((), session=False))
    phases: Phases = field(default_factory=lambda: Phases(session=False))
    session: Session | None = None
    sampler: Sampler | None = None
    residency: Residency | None = None
    process: Process | None = None
    launcher: Popen[bytes] | None = None
    stdin: int = -1
    stdout: Tail | None = None
    stderr: Tail | None = None
    stderr_tail: bytes = b""
    launched: bool = False
    launch_error: str = ""  # "refused:flags ..." and the like, as `bmoe_proto.outcome` reads it
    gate: pb.GateReport | None = None  # the gate that kept it from being launched
    watchdog: pb.WatchdogReport | None = None
    ended_by_us: str = ""  # "agent" or "user" once we asked the engine to end
    status: ExitStatus | None = None
    abandoned: bool = False  # the phone restarted and nobody is left to ask
    disk_full: bool = False
    output_lost: bool = False  # the disk was seen full while the engine wrote to it
    oom_kills: Kills | None = None  # of the engine's group when it started
    kill_evidence: tuple[str, ...] = ()
    foreign_engines: set[int] = field(default_factory=set)  # pids that were told of

    def note(self, code: str, text: str, facts: Mapping[str, Any] | None = None) -> None:
        """Record something worth knowing later."""
        log.info("run %s: %s: %s", self.run_id.hex()[:8], code, text)
        message = pb.Note(code=code, text=text, facts_json=json.dumps(facts) if facts else "")
        self.writer.append("note", message, self.context.clock.boot_ns())

    def note_swept(self, pids: list[int]) -> None:
        """Record what was ended after the engine."""
        if pids:
            self.note("left_behind", f"processes the engine left behind were killed: {pids}", {"pids": pids})

    def record_sample(self, kind: str) -> None:
        """Read the kernel's files now; a failure of the sampler costs the samples, not the run."""
        if self.sampler is None:
            return
        boot_ns = self.context.clock.boot_ns()
        try:
            encoded = self.sampler.encoded(kind)
        except Exception as error:  # whatever the kernel answers, the measurement goes on
            self.sampler = None
            self.note("sampler", f"no more samples in this run: {error!r}")
            return
        self.writer.append_encoded(SAMPLE_FIELD, encoded, boot_ns)

    def record_residency(self) -> None:
        """Look how much of the model is in memory; what it cost is in the message."""
        if self.residency is None:
            return
        boot_ns = self.context.clock.boot_ns()
        try:
            look = self.residency.look(sweep=self.sampling.residency_sweep, layers=self.sampling.residency_layers)
        except Exception as error:  # a file cut short under its mapping, say
            self.residency = None
            self.note("residency", f"not measured any more in this run: {error!r}")
            return
        self.writer.append("residency", look, boot_ns)

    def record_output(self, stream: pb.Stream.ValueType, chunk: Chunk) -> None:
        """Record bytes of the engine, in frames no larger than a block takes."""
        for start in range(0, len(chunk.data), _OUTPUT_BYTES):
            part = chunk.data[start : start + _OUTPUT_BYTES]
            message = pb.Output(
                stream=stream, offset=chunk.offset + start, data=part, uncertainty_ns=chunk.uncertainty_ns
            )
            self.writer.append("output", message, chunk.boot_ns)

    def record_turn(self, report: Report) -> None:
        """Record one step of a turn."""
        message = pb.TurnReport(
            index=report.index,
            request_id=report.request_id,
            state=report.state,
            request=report.request,
            detail=report.detail,
        )
        self.writer.append("turn", message, self.context.clock.boot_ns())

    def keep_stderr(self, data: bytes) -> None:
        """Remember the end of stderr: it holds the reason when the engine does not start."""
        self.stderr_tail = (self.stderr_tail + data)[-STDERR_KEPT_BYTES:]

    def close_files(self) -> None:
        """Give back every descriptor."""
        for tail in (self.stdout, self.stderr):
            if tail is not None:
                tail.close()
        if self.sampler is not None:
            self.sampler.close()
            self.sampler = None
        if self.residency is not None:
            self.residency.close()
            self.residency = None
        if self.launcher is not None and self.launcher.stdin is not None:
            try:
                self.launcher.stdin.close()
            except OSError:
                log.debug("stdin of the engine was gone already")
        self.stdin = -1


_OUTPUT_BYTES = 256 << 10


def effective_sampling(asked: pb.Sampling) -> pb.Sampling:
    """The plan's wishes with the defaults of telemetry.proto put in."""
    sampling = pb.Sampling(period_ms=1000, residency_period_ms=10000, host_probe_period_ms=5000)
    sampling.MergeFrom(asked)
    sampling.period_ms = max(100, sampling.period_ms)
    return sampling
