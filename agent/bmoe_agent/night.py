"""The night: plans in their order, cell by cell, until all that was asked is on record.

In: plans (`submit`), and the runs the spool has recorded. Out: runs. Recorded runs are the only state: which cell comes
next is worked out from the spool's summaries (todo.py), so an agent that is killed, or a phone that restarts,
neither repeats a finished cell nor skips one. On disk, in the agent's home:

    plans/<number>-<plan id>.plan   the plan as it came, serialised; numbers give the order
    plans/<plan id>.state           one JSON object {"state": "cancelled"|"stopped", "why": ...}, only when it was
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bmoe_proto.gates import ABORT, LIMIT
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent import adopt
from bmoe_agent.config import sync_directory, write_private
from bmoe_agent.context import Context
from bmoe_agent.runner import record_unrun, run_attempt
from bmoe_agent.runner_live import AgentStopping, Ended, Live, log
from bmoe_agent.spool import RunSummary, SpoolError
from bmoe_agent.taking import problems, warnings
from bmoe_agent.todo import elapsed_s, next_attempt, next_cell, open_cells, stops
from bmoe_agent.wakelock import WakeLock

TROUBLE_PAUSE_S = 15.0
MIN_FREE_BYTES = 4 << 20
_FILE = re.compile(r"(\d{6,})-([0-9a-f]{32})\.plan")


@dataclass(slots=True)
class Queued:
    """One plan on this phone."""

    number: int
    plan: pb.Plan
    state: str = ""  # "cancelled" or "stopped"; anything else follows from the runs
    why: str = ""


class Night:
    """All plans of this phone. `submit`, `cancel` and `listing` may be called from any thread; `run` has its own."""

    def __init__(self, context: Context, wake_lock: WakeLock | None = None) -> None:
        self._context = context
        self._wake_lock = wake_lock or WakeLock(context.home / "wake-lock")
        self._folder = context.home / "plans"
        self._lock = threading.Lock()
        self._cancel = ""  # why the current cell is to end
        self._current: str | None = None  # id of the running plan
        self._live: Live | None = None  # the open run
        self._idle = threading.Event()
        self._plans = self._load()

    # ---------------------------------------------------------------- asked from outside

    def submit(self, plan: pb.Plan) -> pb.SubmitReply:
        """Take a plan, durably; a plan that is here already is not taken twice."""
        plan_id = plan.plan_id
        reply = pb.SubmitReply(plan_id=plan_id)
        with self._lock:
            if self._is_known(plan, reply):
                return reply
        reply.refused.extend(problems(plan))
        if reply.refused:
            return reply
        self._context.refresh_config()
        reply.warnings.extend(warnings(plan, self._context.config, self._context.gates.readable()[1]))
        with self._lock:
            if self._is_known(plan, reply):  # two hosts may hand it in at once
                return reply
            number = max((item.number for item in self._plans), default=0) + 1
            path = self._folder / f"{number:06d}-{plan_id}.plan"
            try:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                _write_durably(path, plan.SerializeToString())
            except OSError as error:
                reply.refused.append(f"the phone cannot keep the plan: {path}: {error.strerror}")
                return reply
            self._plans.append(Queued(number, plan))
            self._context.wake()
            self._idle.clear()
        return reply

    def _is_known(self, plan: pb.Plan, reply: pb.SubmitReply) -> bool:
        known = next((item for item in self._plans if item.plan.plan_id == plan.plan_id), None)
        if known is None:
            return False
        reply.already = _same(known.plan, plan)
        if not reply.already:
            reply.refused.append(f"plan {plan.plan_id} is another plan on this phone")
        return True

    def cancel(self, plan_id: str, *, only_current_cell: bool) -> pb.CancelReply:
        """Cancel a plan ("": the running one) or the cell it is at."""
        with self._lock:
            wanted = plan_id or self._current or ""
            item = next((item for item in self._plans if item.plan.plan_id == wanted), None)
            if item is None or item.state:
                detail = "nothing is running" if not plan_id else f"plan {plan_id} is not waiting or running here"
                return pb.CancelReply(cancelled=False, detail=detail)
            running = wanted == self._current
            if only_current_cell:
                if not running:
                    return pb.CancelReply(cancelled=False, detail=f"plan {wanted} has no cell running")
                detail = self._cancel = "the cell was cancelled"
            else:
                runs = self._context.spool.summaries()
                if not running and next_cell(item.plan, runs) is None:
                    return pb.CancelReply(cancelled=False, detail=f"plan {wanted} is done")
                begun = running or any(run.plan_id == wanted and run.started for run in runs)
                detail = "the plan was cancelled" + ("" if begun else " before it began")
                if running:
                    self._cancel = detail
                detail += self._mark(item, "cancelled", "cancelled by the user")
        self._context.wake()
        return pb.CancelReply(cancelled=True, detail=detail)

    def tell(self, run_id: bytes, note: pb.Note) -> bool:
        """Add a host's evidence to the run that is open; False when it is not this one, or none."""
        with self._lock:
            live = self._live
            if live is None or live.run_id != run_id:
                return False
            try:
                live.writer.append("note", note, self._context.clock.boot_ns())
            except SpoolError:
                return False  # it ended at this moment
        return True

    def listing(self) -> list[pb.PlanListing]:
        """Every plan and how far it is."""
        with self._lock:
            plans, current = list(self._plans), self._current
        runs = self._context.spool.summaries()
        return [self._listed(item, runs, item.plan.plan_id == current) for item in plans]

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do."""
        return self._idle.wait(timeout_s)

    # ---------------------------------------------------------------- the thread

    def run(self) -> None:
        """Adopt what an agent before left, then run plans until told to stop."""
        context = self._context
        try:
            self._adopt()
            self._finish_stops()
            while not context.stop.is_set():
                since = context.wakes
                todo = self._next()
                if todo is None:
                    self._rest(since)
                    continue
                item, cell, attempt = todo
                if context.free_bytes() < MIN_FREE_BYTES:
                    # A run that cannot be recorded is not begun; a host may take what is kept here.
                    log.error("%s: less than %d bytes free: waiting", context.home, MIN_FREE_BYTES)
                    context.set_now(state="between", run_id=b"", phase="")
                    context.pause(TROUBLE_PAUSE_S)
                    context.spool.delete_acknowledged()
                    continue
                if not self._within_limits(item):
                    continue
                self._one(item, cell, attempt)
        except AgentStopping:
            log.info("stopping; a running engine goes on and is adopted by the next agent")
        finally:
            context.set_now(state="stopping", run_id=b"")
            self._wake_lock.release()

    def _adopt(self) -> None:
        with self._lock:
            self._cancel = ""
        adopted = adopt.adopt_all(self._context, lambda: self._cancel, self._limits, self._opened_adopted)
        for plan_id, ended in adopted:
            log.info("run %s was adopted and is %s (%s)", ended.run_id.hex()[:8], ended.outcome, ended.cause)
            with self._lock:
                item = next((item for item in self._plans if item.plan.plan_id == plan_id), None)
            if item is not None:
                self._after(item, ended)

    def _one(self, item: Queued, cell: pb.Cell, attempt: int) -> None:
        self._context.refresh_config()
        held = self._wake_lock.acquire()
        with self._lock:
            self._cancel = ""
            self._current = item.plan.plan_id
            if item.state:  # cancelled since it was chosen
                self._current = None
                return
        try:
            ended = run_attempt(
                self._context,
                item.plan,
                cell,
                attempt,
                cancelled=lambda: self._cancel,
                opened=self._opened,
                wake_lock=held,
            )
            log.info("cell %s attempt %d: %s (%s)", cell.name, attempt, ended.outcome, ended.cause)
            self._after(item, ended)
        except AgentStopping:
            raise
        except Exception:
            # A disk that fails, or a bug of ours: the run gets its end from what is on disk, the next cell runs.
            log.exception("cell %s cannot be run", cell.name)
            self._context.pause(TROUBLE_PAUSE_S)
            self._adopt()
        finally:
            with self._lock:
                self._current = None
                self._cancel = ""
            self._context.set_now(state="between", run_id=b"", phase="")
            self._context.spool.save_acknowledgements()
            self._context.spool.delete_acknowledged()

    def _opened(self, live: Live | None) -> None:
        with self._lock:
            self._live = live

    def _opened_adopted(self, live: Live | None) -> None:
        """An engine that still runs is watched: with the wake lock, and to its end at once if its plan was cancelled."""
        if live is not None:
            self._wake_lock.acquire()
        with self._lock:
            self._live = live
            self._current = live.plan_id if live is not None else None
            item = next((item for item in self._plans if item.plan.plan_id == self._current), None)
            self._cancel = "the plan was cancelled" if item is not None and item.state == "cancelled" else ""

    def _after(self, item: Queued, ended: Ended) -> None:
        if ended.gate_policy == "abort":
            self._stop(item, f"{ended.cause} gave up and its policy is abort", ABORT)

    def _next(self) -> tuple[Queued, pb.Cell, int] | None:
        runs = self._context.spool.summaries()
        with self._lock:
            waiting = [item for item in self._plans if not item.state]
        for item in waiting:
            found = next_cell(item.plan, runs)
            if found is not None:
                return item, *found
        return None

    def _rest(self, since: int) -> None:
        self._wake_lock.release()
        self._context.set_now(
            state="idle", plan_id="", plan_name="", cell="", cells=0, run_id=b"", phase="", tokens=0, tok_s=None
        )
        with self._lock:
            if self._context.wakes == since:
                self._idle.set()
        # Woken by `submit`; now and then all the same, since a host may have taken what was kept.
        self._context.pause(60.0, since)
        self._context.spool.delete_acknowledged()

    def _within_limits(self, item: Queued) -> bool:
        """Whether the plan may go on. What a limit leaves unrun is on record, cell by cell, with the reason."""
        why = self._limit_reached(item)
        if why:
            self._stop(item, why, LIMIT)
        return not why

    def _stop(self, item: Queued, why: str, gate: str) -> None:
        """End a plan; the cells it leaves unrun get a run each that says why, under the name of `gate` (LIMIT or ABORT).

        Raises `AgentStopping`: the next agent goes on.
        """
        try:
            for cell, attempt in open_cells(item.plan, self._context.spool.summaries()):
                if self._context.stop.is_set():
                    raise AgentStopping
                if item.state:  # cancelled meanwhile
                    break
                record_unrun(self._context, item.plan, cell, attempt, gate=gate, why=why)
        except (OSError, SpoolError):
            log.exception("plan %s: what is left unrun cannot be put on record", item.plan.plan_id)
        with self._lock:
            if not item.state:
                self._mark(item, "stopped", why)

    def _finish_stops(self) -> None:
        """What an agent before decided and did not live to write down follows from its runs: a limit, a gate's `abort`."""
        runs = self._context.spool.summaries()
        for item in [item for item in self._plans if not item.state]:
            causes = stops(item.plan, runs)
            if f"gate:{LIMIT}" in causes:
                self._stop(item, "a limit of the plan was reached before the agent was started again", LIMIT)
            elif causes:
                self._stop(item, "a gate whose policy is abort had given up", ABORT)

    def _limit_reached(self, item: Queued) -> str:
        limits = item.plan.limits
        runs = [run for run in self._context.spool.summaries() if run.plan_id == item.plan.plan_id and run.started]
        if limits.HasField("total_s"):
            took_s = elapsed_s(runs, self._context.clock.pair())
            if took_s > limits.total_s:
                return f"total_s: {took_s:.0f} s since its first cell, at most {limits.total_s:g}"
        if limits.HasField("min_free_bytes") and self._context.free_bytes() < limits.min_free_bytes:
            return f"min_free_bytes: {self._context.free_bytes()} bytes free, at least {limits.min_free_bytes}"
        if limits.HasField("min_battery_pct"):
            gates = self._context.gates
            level, charging = gates.read("battery_pct").value, gates.read("charging").value
            if level is not None and level < limits.min_battery_pct and not charging:
                return f"min_battery_pct: {level:g} % and not charging, at least {limits.min_battery_pct:g} %"
        return ""

    def _limits(self, plan_id: str) -> pb.Limits:
        with self._lock:
            found = next((item.plan for item in self._plans if item.plan.plan_id == plan_id), None)
        return found.limits if found is not None else pb.Limits()

    # ---------------------------------------------------------------- on disk

    def _load(self) -> list[Queued]:
        plans: list[Queued] = []
        names = sorted(os.listdir(self._folder)) if self._folder.is_dir() else []
        for name in names:
            match = _FILE.fullmatch(name)
            if not match:
                continue
            try:
                plan = pb.Plan.FromString((self._folder / name).read_bytes())
                if plan.plan_id != match[2] or not plan.cells:
                    raise ValueError("it is not the plan that its name says")
            except Exception as error:
                # protobuf's DecodeError, or an unreadable file: one plan must not stop the others
                log.error("%s cannot be read and is left out: %s", self._folder / name, error)
                continue
            item = Queued(int(match[1]), plan)
            try:
                facts = json.loads((self._folder / f"{plan.plan_id}.state").read_text(encoding="utf-8"))
                item.state, item.why = str(facts["state"]), str(facts["why"])
            except (OSError, ValueError, KeyError, TypeError):
                pass
            plans.append(item)
        return plans

    def _mark(self, item: Queued, state: str, why: str) -> str:
        """Set how a plan ended; it holds for this agent whatever the disk says, which is returned when it took no note."""
        item.state, item.why = state, why
        path = self._folder / f"{item.plan.plan_id}.state"
        try:
            write_private(path, json.dumps({"state": state, "why": why}) + "\n")
        except OSError as error:
            log.error("%s: %s: that plan %s is %s is not kept", path, error.strerror, item.plan.plan_id, state)
            return f"; the phone cannot keep that ({error.strerror}): when its agent starts again, cancel again"
        return ""

    @staticmethod
    def _listed(item: Queued, runs: Sequence[RunSummary], running: bool) -> pb.PlanListing:
        plan = item.plan
        own: dict[int, list[RunSummary]] = {}
        for run in runs:
            if run.plan_id == plan.plan_id and run.started:
                own.setdefault(run.cell_index, []).append(run)
        done = sum(
            1
            for cell in plan.cells
            if (tried := own.get(cell.index)) and all(run.ended for run in tried) and next_attempt(cell, tried) is None
        )
        state = item.state or ("done" if done == len(plan.cells) else "running" if running else "queued")
        return pb.PlanListing(
            plan_id=plan.plan_id, name=plan.name, cells=len(plan.cells), done=done, state=state, why=item.why
        )


def _same(one: pb.Plan, other: pb.Plan) -> bool:
    """The same plan handed in again, perhaps at another time."""
    a, b = pb.Plan(), pb.Plan()
    a.CopyFrom(one)
    b.CopyFrom(other)
    a.submitted_wall_ns = b.submitted_wall_ns = 0
    return a.SerializeToString(deterministic=True) == b.SerializeToString(deterministic=True)


def _write_durably(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
