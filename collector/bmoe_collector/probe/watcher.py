"""The thread that looks after one connected phone: samples it, prepares it for cells, looks into its log when a run was killed.

In: an adb route, the agent's client, the store. Out: rows of `host_samples`, host notes, and what the agent is told (values for its gates,
what was prepared). It lives as long as the drainer's connection; whatever goes wrong in it costs samples, never the drain.

Pace: every `host_probe_period_ms` once the run is launched (0: none of that run), five seconds while an agent is at its gates, half
a minute when it is idle. Everything costly (`dumpsys`, every thermal zone, cpusets) is asked each half minute and at a run's launch and end.
Idle samples are told to the agent and not stored.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from bmoe_proto import calls
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_collector.ingest.finish import judge
from bmoe_collector.probe import clock, evidence, prepare, reading, rows
from bmoe_collector.probe.frames import Frame
from bmoe_collector.probe.shell import BusyError, ProbeShell
from bmoe_collector.reach.adb import Adb, AdbError
from bmoe_collector.store.engine import Store

LOG = logging.getLogger("bmoe.probe")
MEASURING = frozenset({"loading", "measuring"})
WAITING_S = 5.0
LIST_SHARE = 0.002
"""Of a core: all processes of a phone are listed as often as that allows, at a run's launch and end in any case."""


class Client(prepare.Teller, Protocol):
    """What of the agent's client is used."""

    def clock(self) -> pb.ClockReply:
        """Its clocks."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds; tests turn them faster."""

    idle_s: float = 30.0
    slow_s: float = 30.0
    rare_s: float = 60.0
    answer_s: float = 25.0
    retry_first_s: float = 2.0
    retry_most_s: float = 60.0
    busy_s: float = 5.0
    clock_s: float = 600.0


class Watcher(threading.Thread):
    """One phone's probe. Start it after the hello; `stop` ends it and waits."""

    def __init__(
        self,
        agent_uuid: bytes,
        adb: Adb,
        transport_id: int,
        client: Client,
        store: Store,
        *,
        ticks_per_s: int = 100,
        doing: str = "",
        pace: Pace | None = None,
        changed: Callable[[list[str]], None] | None = None,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        """`doing` is the agent's state as it said it last. `changed` is told of runs to judge again (they are judged here
        without it), `settled` is called when nothing is pending any more.
        """
        super().__init__(name=f"probe-{agent_uuid.hex()[:8]}", daemon=True)
        self.uuid = agent_uuid.hex()
        self._adb = adb
        self._transport_id = transport_id
        self._client = client
        self._store = store
        self._pace = pace or Pace()
        self._ticks_per_s = ticks_per_s or 100
        self._doing = doing
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._news = True  # the database may know something new
        self._ended = 1  # ends to look after; the first look is for those of earlier connections
        self._lock = threading.Lock()
        self._run: rows.OpenRun | None = None
        self._prepared = ""  # the run that was prepared last
        self._screen_kept = False
        self._asleep = False
        self._offset: clock.Offset | None = None
        self._shell: ProbeShell | None = None
        self._state = reading.State(ticks_per_s=self._ticks_per_s)
        self._next_s = self._slow_s = self._rare_s = self._list_s = 0.0
        self._list_cost_ms = 0.0
        self._said = ""
        self._trouble = False
        self._changed = changed or (lambda run_ids: judge(store, run_ids))
        self._settled = settled
        self.samples = 0

    # ------------------------------------------------------------ told by the drainer

    def poke(self, run_id: str = "") -> None:
        """Something of this phone was committed, of that run if it is named: one that is measured has no news but its end."""
        run = self._run
        if run is not None and run.launched and run.run_id == run_id and self._doing in MEASURING:
            return
        self._news = True
        self._wake.set()

    def heard(self, doing: str) -> None:
        """What the agent does now."""
        if doing != self._doing:
            self._doing = doing
            self._news = True
            self._wake.set()

    def run_ended(self) -> None:
        """A run's record is here whole."""
        with self._lock:
            self._ended += 1
        self._doing = "between" if self._doing in MEASURING else self._doing
        self.poke()

    @property
    def pending(self) -> bool:
        """Whether an ended run still waits for its look into the log."""
        return self.is_alive() and self._ended > 0 and not self._trouble and self._doing not in MEASURING

    def stop(self, within_s: float = 30.0) -> None:
        """End it; what is pending for ended runs is done first while the link stands."""
        self._stopping.set()
        self._wake.set()
        if not self._ended and self._shell is not None:
            self._shell.close()
        self.join(within_s)

    # ------------------------------------------------------------ the thread

    def run(self) -> None:
        """Watch until stopped."""
        pause_s = self._pace.retry_first_s
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                if self._offset is None or self._doing not in MEASURING:
                    self._offset = clock.measure(self._client.clock)
                self._trouble = False
                # Before the shell is opened: a collector that only came to fetch does not wait for it.
                self._look_after_ended()
                try:
                    self._watch()
                except BusyError as busy:
                    self._tell_once("another host's", str(busy))
                    self._without_shell(str(busy))
                    pause_s = self._pace.busy_s
            except (AdbError, calls.CallError) as error:
                if not self._stopping.is_set():
                    self._tell_once("lost", str(error))
                self._in_trouble()
            except Exception:  # a bug here must not cost the drain
                LOG.exception("probe", extra={"phone": self.uuid})
                pause_s = self._pace.retry_most_s
                self._in_trouble()
            if time.monotonic() - began > 60:
                pause_s = self._pace.retry_first_s
            if self._stopping.wait(pause_s):
                break
            pause_s = min(pause_s * 2, self._pace.retry_most_s)
        self._last_words()

    def _in_trouble(self) -> None:
        """Nobody waits for a shell that does not answer."""
        self._trouble = True
        self._settled()

    def _last_words(self) -> None:
        """A run that ended a moment ago is looked after before the thread ends."""
        if self._ended:
            with contextlib.suppress(AdbError, calls.CallError):
                try:
                    self._look_after_ended()
                except Exception:
                    LOG.exception("probe", extra={"phone": self.uuid})

    def _tell_once(self, event: str, detail: str) -> None:
        if detail != self._said:
            self._said = detail
            LOG.info("probe", extra={"phone": self.uuid, "state": event, "detail": detail})

    def _watch(self) -> None:
        with ProbeShell(self._adb, self._transport_id, self.uuid, self._store.store_id) as shell:
            self._shell = shell
            self._screen_kept = False
            self._state = reading.State(ticks_per_s=self._ticks_per_s)
            try:
                self._learn(shell)
                LOG.info("probe", extra={"phone": self.uuid, "state": "open", "refused": len(self._state.refused)})
                self._next_s = self._slow_s = self._rare_s = self._list_s = 0.0
                while not self._stopping.is_set():
                    self._turn(shell)
            finally:
                self._shell = None

    def _without_shell(self, why: str) -> None:
        """Another host samples: the log is searched and wishes are answered all the same."""
        self._news = True
        self._look()
        if self._run is not None and not self._run.launched and self._prepared != self._run.run_id:
            self._prepared = self._run.run_id
            for code, asked in (("stop_apps", bool(self._run.stop_apps)), ("screen_on", self._run.screen_on)):
                if asked:
                    self._report(self._run, prepare.Done(code, done=False, text=why))
        self._look_after_ended()

    def _learn(self, shell: ProbeShell) -> None:
        tries = " ".join(f"/{node}" for node in (*reading.FAST_FILES, "proc/uptime", "proc/zoneinfo"))
        constant = " ".join(f"/{node}" for node in reading.CONSTANT_FILES)
        first, second = shell.ask([("try", tries), ("files", f"/proc/uptime {constant}")], self._pace.answer_s)
        reading.learn(self._state, first, second)

    def _turn(self, shell: ProbeShell) -> None:
        """Whatever is due now, then wait."""
        self._wake.clear()
        edge = self._look()
        self._prepare(shell)
        now = time.monotonic()
        period_s = self._period_s()
        if edge:
            self._next_s = self._slow_s = self._list_s = 0.0
        if period_s is not None and now >= self._next_s:
            self._next_s = now + period_s
            self._sample(shell, now)
        if self._ended:
            self._look_after_ended()
        wait_s = self._pace.idle_s if period_s is None else self._next_s - time.monotonic()
        if wait_s > 0 and not self._stopping.is_set():
            # Commits come once a second while a cell is measured; looking more often than that shows nothing new.
            self._wake.wait(wait_s)
            self._stopping.wait(0.2)

    def _period_s(self) -> float | None:
        """Seconds between samples now; None for none."""
        if self._run is not None and self._run.launched:
            return self._run.period_ms / 1e3 if self._run.period_ms else None
        if self._run is not None:
            return WAITING_S  # gates are no measured cell
        return WAITING_S if self._doing in {"gating", *MEASURING} else self._pace.idle_s

    def _look(self) -> bool:
        """Ask the database what this phone runs; True at a run's launch and end."""
        if not self._news:
            return False
        self._news = False
        before, self._run = self._run, rows.open_run(self._store, self.uuid)
        was = (before.run_id, before.launched) if before is not None else None
        now = (self._run.run_id, self._run.launched) if self._run is not None else None
        return was != now

    # ------------------------------------------------------------ samples

    def _sample(self, shell: ProbeShell, now: float) -> None:
        slow = now >= self._slow_s
        rare = now >= self._rare_s
        asked: dict[str, tuple[str, str]] = {
            "files": ("files", f"/proc/uptime {reading.fast_files(self._state)}"),
        }
        lists = now >= self._list_s
        if lists:
            asked["procs"] = ("procs", "")
        if slow:
            self._slow_s = now + self._pace.slow_s
            asked["slow"] = ("files", f"/proc/uptime {reading.slow_files()}")
            asked |= {name: ("do", name) for name in reading.slow_dumps(self._state)}
        if rare:
            self._rare_s = now + self._pace.rare_s
            asked |= {name: ("do", name) for name in reading.RARE_DUMPS}
        asked["cost"] = ("cost", "")
        low = time.monotonic_ns()
        frames = shell.ask(list(asked.values()), self._pace.answer_s)
        high = time.monotonic_ns()
        answers: dict[str, Frame] = dict(zip(asked, frames, strict=True))
        offset = self._clock()
        run = self._run
        sample = reading.read(
            self._state,
            "idle" if run is None else "slow" if slow else "fast",
            answers,
            offset.choose(reading.place(frames), low, high),
            our_pids=run.pids if run is not None else (),
            probe_pid=shell.pid,
            whole=rare,
        )
        self.samples += 1
        if lists:
            # Half of what it was and half of what it is now: the kernel counts in hundredths of a second.
            self._list_cost_ms = (self._list_cost_ms + float(sample.values.get("probe_cpu_ms", 0.0))) / 2
            self._list_s = now + self._list_cost_ms / 1e3 / LIST_SHARE
        self._asleep = sample.values.get("awake", not self._asleep) is False
        if run is not None or self._ended:
            rows.put_sample(self._store, self.uuid, offset.boot_id, sample)
        if slow or (self._doing == "gating" and "cpu_temp_c" in sample.values):
            prepare.tell_values(self._client, sample.values)

    def _clock(self) -> clock.Offset:
        """The offset of the phone's clock, measured again now and then, never while a cell is measured."""
        offset = self._offset
        assert offset is not None
        if time.monotonic_ns() - offset.here_ns > self._pace.clock_s * 1e9 and self._doing not in MEASURING:
            self._offset = offset = clock.measure(self._client.clock)
        return offset

    # ------------------------------------------------------------ preparation

    def _prepare(self, shell: ProbeShell) -> None:
        run = self._run
        wants_screen = run is not None and run.screen_on
        if self._screen_kept and not wants_screen and (run is not None or self._doing in {"idle", "stopping"}):
            done = prepare.screen(False, lambda asked: shell.ask(asked, self._pace.answer_s))
            self._screen_kept = False
            LOG.info("screen given back", extra={"phone": self.uuid, "done": done.done, "detail": done.text})
        if run is None or run.run_id == self._prepared:
            return
        self._prepared = run.run_id
        if not run.stop_apps and not run.screen_on:
            return
        found: list[prepare.Done] = []
        if run.launched:
            late = "the cell was launched before this host knew of it"
            found += [prepare.Done("stop_apps", done=False, text=late)] if run.stop_apps else []
            found += (
                [prepare.Done("screen_on", done=False, text=late)] if run.screen_on and not self._screen_kept else []
            )
        else:
            found = self._do(shell, run)
        for done in found:
            self._report(run, done)
        self._slow_s = self._next_s = 0.0  # what the gates hear of the screen is to be the new state

    def _do(self, shell: ProbeShell, run: rows.OpenRun) -> list[prepare.Done]:
        def ask(asked: Any) -> list[Frame]:
            return shell.ask(asked, self._pace.answer_s)

        found = [prepare.stop_apps(run.stop_apps, ask)] if run.stop_apps else []
        if run.screen_on:
            done = prepare.screen(True, ask, asleep=self._asleep)
            self._screen_kept = self._screen_kept or done.done
            found.append(done)
        return found

    def _report(self, run: rows.OpenRun, done: prepare.Done) -> None:
        """Onto the record: the phone's own when its run is open, else the host's note beside it."""
        offset = self._offset
        boot_ns = offset.place(time.monotonic_ns(), time.monotonic_ns())[0] if offset is not None else 0
        note = rows.HostNote(done.code, done.text, {**done.facts, "done": done.done}, boot_ns)
        LOG.info("prepared", extra={"phone": self.uuid, "run": run.run_id, "what": done.code, "done": done.done})
        if not self._tell(run.run_id, note):
            rows.put_notes(self._store, run.run_no, [note])

    def _tell(self, run_id: str, note: rows.HostNote) -> bool:
        try:
            return self._client.tell(bytes.fromhex(run_id), rows.note_message(note, run_id))
        except calls.CallError as error:
            LOG.debug("tell", extra={"phone": self.uuid, "detail": str(error)})
            return False

    # ------------------------------------------------------------ ended runs

    def _look_after_ended(self) -> None:
        """Give ended runs their samples, search the log for those that were killed, judge them again."""
        if self._doing in MEASURING:
            return  # searching a log is work for the phone: it waits for the gap between cells
        with self._lock:
            waiting = self._ended
        changed = [run_id for _, run_id in rows.attach_ended(self._store, self.uuid)]
        boot_id = self._offset.boot_id if self._offset is not None else ""
        try:
            for run in rows.unsearched(self._store, self.uuid):
                notes = evidence.search(run, boot_id, self._ask_log)
                rows.put_notes(self._store, run.run_no, notes)
                changed.append(run.run_id)
                found = [note for note in notes if note.code == rows.KILL]
                LOG.info("log searched", extra={"phone": self.uuid, "run": run.run_id, "found": len(found)})
                for note in found:
                    self._tell(run.run_id, note)
        finally:  # the link may have gone in mid-search: what was found of others counts all the same
            if changed:
                self._changed(list(dict.fromkeys(changed)))
        with self._lock:
            self._ended -= waiting
        self._settled()

    def _ask_log(self, command: str) -> str:
        return self._adb.shell(self._transport_id, command, 40.0).decode("utf-8", "replace")
