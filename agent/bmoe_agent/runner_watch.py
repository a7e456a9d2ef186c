"""Watching a running engine: output, samples, turns, watchdog, and ending it.

In: a `Live` whose engine runs, launched by this agent or adopted. Out: the same with its exit status, when the engine
has ended; `AgentStopping` when the agent is told to stop while it runs.

One loop, four looks a second. Nothing here syncs to disk (law 7), and only the engine we own is ever signalled.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Literal

from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent import launch, leftovers
from bmoe_agent.phase import Event, Phase
from bmoe_agent.runner_live import AgentStopping, Live, log
from bmoe_agent.watchdog import Bounds, Progress, Verdict, Watchdog

LOOK_NS = 250_000_000
OBSERVER_NS = 30_000_000_000
WATCHDOG_NS = 1_000_000_000
BATTERY_NS = 60_000_000_000  # it changes slowly, and reading it may start a program
STATUS_WAIT_NS = 10_000_000_000
NO_ROOM_BYTES = 128 << 10
WatchdogPhase = Literal["load", "start", "prefill", "decode", "idle"]
_WATCHDOG_PHASE: Mapping[Phase, WatchdogPhase] = {
    "load": "load",
    "ready": "idle",
    "prefill": "prefill",
    "decode": "decode",
    "finishing": "decode",
    "fatal": "decode",
}


class Watch:
    """The loop over one engine."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._clock = live.context.clock
        now = self._clock.boot_ns()
        self._period_ns = live.sampling.period_ms * 1_000_000
        self._residency_ns = live.sampling.residency_period_ms * 1_000_000
        self._next_sample_ns = now + self._period_ns
        self._next_residency_ns = now + self._residency_ns if self._residency_ns else None
        self._next_observer_ns = now + OBSERVER_NS
        self._next_watchdog_ns = now + WATCHDOG_NS
        self._session_look_ns: int | None = None
        self._watchdog = Watchdog(Bounds.of(live.cell.watchdog, live.limits), now / 1e9)
        self._gates = live.context.gates
        self._next_battery_ns = now
        self._blind: set[str] = set()
        self._pending = bytearray()
        self._stdin_offset = 0
        self._gone_since_ns: int | None = None

    def run(self) -> None:
        """Watch until the engine has ended and its exit is known or will not be known any more."""
        live = self._live
        wanted_ns = self._clock.boot_ns()
        if live.ended_by_us:
            self._end_again(wanted_ns)
        while True:
            now = self._clock.boot_ns()
            # The status is looked for before the output is read: whatever was written before the end is then there.
            ended = self._has_ended(now)
            self._read_output(now, last=ended)
            self._look_at_disk()
            if ended:
                return
            self._turns(now)
            self._periodic(now)
            self._consider_ending(now)
            self._tell(now)
            if live.context.stop.is_set():
                raise AgentStopping
            wanted_ns = now if self._behind() else max(wanted_ns + LOOK_NS, now)
            if self._session_look_ns is not None:
                wanted_ns = min(wanted_ns, max(self._session_look_ns, now))
            before = time.monotonic_ns()
            pause_ns = max(1_000_000, wanted_ns - self._clock.boot_ns())
            live.context.pause(pause_ns / 1e9)
            live.observer.slept(pause_ns, time.monotonic_ns() - before)

    def _behind(self) -> bool:
        """Whether the engine has written more than one look takes: the next one is due at once."""
        return any(tail is not None and tail.behind for tail in (self._live.stdout, self._live.stderr))

    def read_rest(self, *, unread: bool = False) -> None:
        """Record what an engine that is gone has left in its files; `unread`: without looking at what it says."""
        self._read_output(self._clock.boot_ns(), last=True, unread=unread)

    def _look_at_disk(self) -> None:
        """The engine's own writes to a full disk are lost without a word of its own: the record must say so."""
        live = self._live
        if live.output_lost or (free := live.context.free_bytes()) >= NO_ROOM_BYTES:
            return
        live.output_lost = live.disk_full = True
        live.note("disk_full", f"{free} bytes free: what the engine writes now may be lost", {"free_bytes": free})

    # ---------------------------------------------------------------- output and turns

    def _read_output(self, now: int, *, last: bool, unread: bool = False) -> None:
        live = self._live
        if live.stderr is not None:
            for chunk in live.stderr.rest(now) if last else live.stderr.look(now):
                live.record_output(pb.STREAM_STDERR, chunk)
                live.keep_stderr(chunk.data)
        if live.stdout is not None:
            for chunk in live.stdout.rest(now) if last else live.stdout.look(now):
                live.record_output(pb.STREAM_STDOUT, chunk)
                if unread:
                    continue
                for event in live.phases.feed(live.stdout.lines(chunk), now):
                    self._on(event, now)

    def _on(self, event: Event, now: int) -> None:
        live = self._live
        if live.session is not None:
            for report in live.session.on(event):
                live.record_turn(report)
        if event.name in {"done", "decided", "error"} and not event.fatal:
            live.record_sample("turn")
            self._next_sample_ns = now + self._period_ns
            # "At most 2 s are in an unwritten block", and a turn's end is what a reader waits for.
            live.writer.flush()

    def _turns(self, now: int) -> None:
        live = self._live
        session = live.session
        self._session_look_ns = None
        if session is None or live.stdin < 0:
            return
        if self._pending:
            self._write_stdin(now)
            return
        step = session.step(now, live.phases.turn_tokens)
        for report in step.reports:
            live.record_turn(report)
        if step.reports:
            # On file before it is sent: an agent killed right after must know that it was.
            live.writer.flush()
        self._session_look_ns = step.next_ns
        if step.close:
            # The engine idles with its caches warm: the last moment at which its own files can be read.
            live.record_sample("exit")
        if step.write:
            self._pending += step.write
            self._write_stdin(now)
        if step.close and not self._pending:
            self._close_stdin()

    def _write_stdin(self, now: int) -> None:
        """Write what the pipe takes; an engine that does not read its requests must not stop the watch."""
        live = self._live
        try:
            written = os.write(live.stdin, self._pending)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.EPIPE:
                live.note("stdin", f"the engine's stdin could not be written: {error.strerror}")
            self._pending.clear()
            self._close_stdin()
            return
        chunk = pb.Output(stream=pb.STREAM_STDIN, offset=self._stdin_offset, data=bytes(self._pending[:written]))
        live.writer.append("output", chunk, now)
        self._stdin_offset += written
        del self._pending[:written]
        if not self._pending and live.session is not None and live.session.closed:
            self._close_stdin()

    def _close_stdin(self) -> None:
        live = self._live
        if live.launcher is not None and live.launcher.stdin is not None:
            try:
                live.launcher.stdin.close()
            except OSError:
                log.debug("stdin of the engine was gone already")
        live.stdin = -1

    # ---------------------------------------------------------------- periodic

    def _periodic(self, now: int) -> None:
        live = self._live
        if now >= self._next_sample_ns:
            live.record_sample("fast")
            self._next_sample_ns += self._period_ns
            if self._next_sample_ns <= now:  # frozen, or the machine was busy: no burst to catch up
                self._next_sample_ns = now + self._period_ns
        if self._next_residency_ns is not None and now >= self._next_residency_ns:
            live.record_residency()
            self._next_residency_ns = now + self._residency_ns
        if now >= self._next_observer_ns:
            live.writer.append("observer", live.observer.cost(live.sampler), now)
            self._next_observer_ns = now + OBSERVER_NS

    def _tell(self, now: int) -> None:
        live = self._live
        phase = live.phases.phase
        live.context.set_now(
            state="loading" if phase in {"load", "prefill"} and not live.phases.tokens else "measuring",
            phase=phase,
            tokens=live.phases.tokens,
            tok_s=live.phases.rate_tok_s(now),
        )

    # ---------------------------------------------------------------- ending

    def _consider_ending(self, now: int) -> None:
        live = self._live
        if live.process is None:
            return
        if not live.ended_by_us and (why := live.cancelled()):
            live.ended_by_us = "user"
            live.note("cancelled", why)
            self._ask_to_end()
            self._watchdog.asked_to_stop(now / 1e9, Verdict("cancelled", 0.0, 0.0, ""))
        if now < self._next_watchdog_ns:
            return
        self._next_watchdog_ns = now + WATCHDOG_NS
        verdict = self._watchdog.feed(now / 1e9, self._progress(now))
        if verdict is None:
            return
        if verdict.action == "sigkill":
            if launch.send_signal(live.process, signal.SIGKILL):
                self._report_kill(verdict, now)
            return
        live.watchdog = verdict.report()
        live.writer.append("watchdog", live.watchdog, now)
        live.ended_by_us = "agent"
        live.disk_full |= verdict.rule == "disk"
        self._ask_to_end()

    def _end_again(self, now: int) -> None:
        """An agent before this one decided on the end, and may not have lived to see it."""
        told = self._live.watchdog or pb.WatchdogReport(rule="cancelled")
        self._ask_to_end()
        self._watchdog.asked_to_stop(now / 1e9, Verdict(told.rule, told.bound, told.seen, told.unit))

    def _ask_to_end(self) -> None:
        live = self._live
        assert live.process is not None
        if live.session is not None:
            for report in live.session.abandon(f"ended by the {live.ended_by_us}"):
                live.record_turn(report)
        live.writer.flush()
        launch.send_signal(live.process, signal.SIGTERM)

    def _report_kill(self, verdict: Verdict, now: int) -> None:
        live = self._live
        if live.watchdog is not None:
            live.writer.append("watchdog", verdict.report(), now)
        else:
            live.note("sigkill", verdict.detail)

    def _progress(self, now: int) -> Progress:
        live = self._live
        assert live.process is not None
        bounds = self._watchdog.bounds
        cpu_s, read_bytes = launch.work_done(live.process)
        values: dict[str, float | None] = {}
        if bounds.max_cpu_temp_c is not None:
            values["cpu_temp_c"] = self._sensed("cpu_temp_c")
        if bounds.min_battery_pct is not None and now >= self._next_battery_ns:
            self._next_battery_ns = now + BATTERY_NS
            values["battery_pct"] = self._sensed("battery_pct")
            values["charging"] = self._gates.read("charging").value
        charging = values.get("charging")
        return Progress(
            phase=self._phase(),
            bytes_out=(live.stdout.size if live.stdout else 0) + (live.stderr.size if live.stderr else 0),
            tokens=live.phases.tokens,
            cpu_s=cpu_s,
            read_bytes=read_bytes,
            cpu_temp_c=values.get("cpu_temp_c"),
            battery_pct=values.get("battery_pct"),
            charging=None if charging is None else charging > 0,
            free_bytes=live.context.free_bytes() if bounds.min_free_bytes is not None else None,
        )

    def _sensed(self, gate: str) -> float | None:
        """What a bound is held against. What cannot be read is None, which decides nothing, and is on record once."""
        reading = self._gates.read(gate)
        if reading.value is None and gate not in self._blind:
            self._blind.add(gate)
            self._live.note("not_watched", f"the bound on {gate} has nothing to watch: {reading.text}", {"gate": gate})
        return reading.value

    def _phase(self) -> WatchdogPhase:
        """The phase as the watchdog bounds it: only an engine that nobody has asked for anything may idle for ever."""
        live = self._live
        phase = _WATCHDOG_PHASE[live.phases.phase]
        if phase == "load" and live.session is None:
            return "start"
        if phase == "idle" and live.session is not None:
            if live.session.current is not None:
                return "prefill"  # asked, and not begun
            if live.session.closed or live.stdin < 0:
                return "decode"  # told to end, and still here
        return phase

    def _has_ended(self, now: int) -> bool:
        """Whether the engine is gone. Its launcher is given time to write the status."""
        live = self._live
        live.status = launch.read_status(live.directory)
        if live.status is not None:
            self._reap()
            return True
        assert live.process is not None
        if launch.alive(live.process):
            self._gone_since_ns = None
            return False
        if self._gone_since_ns is None:
            self._gone_since_ns = now
        if launch.session_alive(live.process) and now - self._gone_since_ns < STATUS_WAIT_NS:
            return False
        live.status = launch.read_status(live.directory)
        self._reap()
        return True

    def _reap(self) -> None:
        live = self._live
        assert live.process is not None
        live.note_swept(leftovers.sweep(live.process, live.directory))
        if live.launcher is not None:
            try:
                live.launcher.wait(timeout=5)
            except subprocess.TimeoutExpired:
                log.warning("the launcher of run %s does not end", live.run_id.hex()[:8])
