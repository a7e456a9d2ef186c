"""Runs that an agent left without an end: adopted when their engine still runs, else closed from what is on disk.

In: the spool's unfinished runs, each with its frames and its directory. Out: `Ended` for each.

The record says how far the agent before had come: RunStarted, Launched, the output's offsets, turns. The directory says
what the engine did since: its output, its pid with start ticks, its exit status. A run whose boot is over has no engine
to ask (the boot id changed); without a status file its exit is "not observed", never a guess.

A session's stdin closed with the agent that held it: the engine finishes its turn and ends, and the turns never sent
are recorded as not run.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent import launch, leftovers, oomkills, runner_close
from bmoe_agent.config import ConfigError
from bmoe_agent.context import Context
from bmoe_agent.launch_argv import recorded_command
from bmoe_agent.phase import Phases
from bmoe_agent.runner import abort_unwatched, open_residency
from bmoe_agent.runner_live import AgentStopping, Ended, Live, effective_sampling, log
from bmoe_agent.runner_watch import Watch
from bmoe_agent.sampling import Observer, Sampler
from bmoe_agent.session import Session
from bmoe_agent.spool import RunSummary, RunWriter, SpoolError
from bmoe_agent.tail import CHUNK_BYTES, Chunk, Tail


@dataclass(slots=True)
class Record:
    """What the frames of an unfinished run say."""

    started: pb.RunStarted | None = None
    launched: pb.Launched | None = None
    boot_id: str = ""
    started_boot_ns: int = 0
    turns: list[pb.TurnReport] = field(default_factory=list)
    offsets: dict[int, int] = field(default_factory=dict)  # stream to the end of what is recorded of it
    watchdog: pb.WatchdogReport | None = None
    gate: pb.GateReport | None = None
    cancelled: bool = False
    agent_failed: bool = False
    not_launched: str = ""
    observer: pb.ObserverCost | None = None

    def take(self, frame: pb.Frame) -> None:
        """Learn from one frame."""
        what = frame.WhichOneof("what")
        if what == "segment_opened":
            self.boot_id = self.boot_id or frame.segment_opened.boot_id
        elif what == "run_started":
            self.started = frame.run_started
            self.started_boot_ns = frame.boot_ns
            self.boot_id = frame.run_started.clock.boot_id or self.boot_id
        elif what == "launched":
            self.launched = frame.launched
        elif what == "output":
            end = frame.output.offset + len(frame.output.data)
            self.offsets[frame.output.stream] = max(end, self.offsets.get(frame.output.stream, 0))
        elif what == "turn":
            self.turns.append(frame.turn)
        elif what == "watchdog":
            self.watchdog = frame.watchdog
        elif what == "observer":
            self.observer = frame.observer
        elif what == "gate":
            gave_up = frame.gate.state in {"gave_up", "unreadable"} and frame.gate.policy != "run-flagged"
            self.gate = frame.gate if gave_up else self.gate
        elif what == "note":
            self.cancelled |= frame.note.code == "cancelled"
            self.agent_failed |= frame.note.code == "agent_error"
            if frame.note.code == "not_launched":
                self.not_launched = frame.note.text


def unfinished(context: Context) -> list[RunSummary]:
    """Runs without an end, oldest first."""
    return [run for run in context.spool.summaries() if not run.ended and not run.deleted]


def adopt_all(
    context: Context,
    cancelled: Callable[[], str],
    limits: Callable[[str], pb.Limits],
    opened: Callable[[Live | None], None] = lambda _: None,
) -> list[tuple[str, Ended]]:
    """Deal with every unfinished run: those without an engine first, then the one that still runs is watched.

    Raises `AgentStopping` when the agent is told to stop meanwhile. A run that cannot be dealt with stays as it is, is
    told in the log, and does not keep the others. `limits` gives a plan's limits by its id; `opened` is told the run
    that is watched.
    """
    waiting: list[Live] = []
    ended: list[tuple[str, Ended]] = []
    context.spool.drop_unbegun()
    try:
        for summary in unfinished(context):
            try:
                live = _take_over(context, summary, cancelled)
                live.limits = limits(live.plan_id)
                if live.process is not None:
                    waiting.append(live)
                else:
                    ended.append((live.plan_id, _close(live)))
            except Exception:
                log.exception("run %s cannot be adopted; it stays as it is", summary.run_id.hex())
        while waiting:
            opened(waiting[0])
            ended.append((waiting[0].plan_id, _watch(waiting[0])))
            del waiting[0]
    finally:
        opened(None)
        for live in waiting:
            live.writer.seal()
            live.close_files()
    return ended


def _take_over(context: Context, summary: RunSummary, cancelled: Callable[[], str]) -> Live:
    # Opened first: that cuts a torn tail and puts damage aside, so that what is read then is whole blocks.
    writer = context.spool.open_run(summary.run_id)
    try:
        record = _read(context, summary.run_id)
        return _restored(context, summary, record, writer, cancelled)
    except BaseException:
        writer.seal()
        raise


def _read(context: Context, run_id: bytes) -> Record:
    record = Record()
    for frame in context.spool.frames(run_id):
        record.take(frame)
    return record


def _restored(
    context: Context, summary: RunSummary, record: Record, writer: RunWriter, cancelled: Callable[[], str]
) -> Live:
    started = record.started or pb.RunStarted()
    now = context.clock.boot_ns()
    live = Live(
        context=context,
        plan_id=started.plan_id,
        cell=started.cell,
        attempt=started.attempt,
        run_id=summary.run_id,
        writer=writer,
        directory=context.run_directory(summary.run_id),
        cancelled=cancelled,
        observer=Observer(carried=record.observer),
        sampling=effective_sampling(started.sampling),
        model=started.model,
        command=recorded_command(started.cell, list(started.argv)),
        watchdog=record.watchdog,
        gate=record.gate,
        launch_error=record.not_launched,
        ended_by_us="user" if record.cancelled else "agent" if record.watchdog or record.agent_failed else "",
    )
    process = launch.read_pid(live.directory)
    live.launched = process is not None or record.launched is not None
    same_boot = record.boot_id == context.clock.boot_id
    if live.launched:
        _restore_output(live, record, now)
    live.status = launch.read_status(live.directory)
    if process is not None and same_boot and live.status is None and launch.alive(process):
        live.process = process
        live.note("adopted", f"engine {process.pid} still runs; a new agent goes on watching it")
        message = pb.Launched(pid=process.pid, start_ticks=process.start_ticks, adopted=True)
        writer.append("launched", message, now)
        _restore_sensors(live, started)
    else:
        # Nobody is left to ask after a restart; nor is there when the agent died before it launched anything.
        live.abandoned = live.status is None and not (same_boot and live.launched)
        gone = "its engine is gone" if live.launched else "nothing had been launched"
        why = gone if same_boot else "the phone restarted"
        live.note("closed_from_disk", f"{why}; the run is closed from what is on disk")
        if process is not None and same_boot:
            live.note_swept(leftovers.sweep(process, live.directory, just_ended=False))
    writer.flush()
    return live


def _restore_output(live: Live, record: Record, now: int) -> None:
    """Go on where the record ends: phases from the bytes recorded, turns from their reports."""
    live.phases = Phases(session=live.command.session)
    looked = min(record.started_boot_ns, now)
    live.stdout = Tail(live.directory / "stdout", offset=record.offsets.get(pb.STREAM_STDOUT, 0), looked_boot_ns=looked)
    live.stderr = Tail(live.directory / "stderr", offset=record.offsets.get(pb.STREAM_STDERR, 0), looked_boot_ns=looked)
    for chunk in _prefix(live.stdout):
        live.phases.feed(live.stdout.lines(chunk), now)
    for chunk in _prefix(live.stderr):
        live.keep_stderr(chunk.data)
    if live.command.session:
        live.session = Session(live.command.turns)
        live.session.restore(record.turns)
        for report in live.session.abandon("the agent was restarted, and the engine's stdin had closed with it"):
            live.record_turn(report)


def _prefix(tail: Tail) -> list[Chunk]:
    """What was recorded of a file, in pieces."""
    chunks: list[Chunk] = []
    try:
        with tail.path.open("rb") as file:
            at = 0
            while at < tail.offset and (data := file.read(min(CHUNK_BYTES, tail.offset - at))):
                chunks.append(Chunk(at, data, 0, 0))
                at += len(data)
    except OSError as error:
        log.warning("%s: %s: what it held is in the record, the rest is lost", tail.path, error.strerror)
    return chunks


def _restore_sensors(live: Live, started: pb.RunStarted) -> None:
    context = live.context
    assert live.process is not None
    live.sampler = Sampler(context.roots, live.process.pid)
    live.oom_kills = oomkills.count(context.roots, live.process.pid)
    try:
        open_residency(live, context.config.model(started.cell.model))
    except ConfigError as error:
        live.note("residency", f"not measured any more: {error}")
    plan_cells = started.plan_cells or 1
    context.set_now(
        state="measuring",
        plan_id=started.plan_id,
        plan_name=started.plan_name,
        cell=started.cell.name,
        cell_index=started.cell.index,
        cells=plan_cells,
        run_id=live.run_id,
    )


def _watch(live: Live) -> Ended:
    try:
        live.context.set_now(state="measuring", run_id=live.run_id)
        Watch(live).run()
        return runner_close.close(live)
    except AgentStopping:
        live.writer.seal()
        raise
    except BaseException:
        abort_unwatched(live)
        raise
    finally:
        live.close_files()


def _close(live: Live) -> Ended:
    """No engine is left: read what it wrote to the end, and write the run's end."""
    try:
        watch = Watch(live)
        try:
            watch.read_rest()
        except (OSError, SpoolError):
            raise
        except Exception:
            # Output that we fail at must not keep the run from its end for ever: the rest of it is recorded unread.
            live.note("agent_error", traceback.format_exc(limit=-8)[-4000:])
            watch.read_rest(unread=True)
        return runner_close.close(live)
    except BaseException:
        abort_unwatched(live)
        raise
    finally:
        live.close_files()
