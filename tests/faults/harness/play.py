"""One schedule from its seed to its result.

In: a schedule and a folder that is made and removed. Out: a `Result`, as a JSON line. The order: everything is started and
paired, what each process holds is noted, the plan is handed to all phones, faults come and go, everything is healed, the
collector must bring the rest by itself, then truth and leaks are looked at.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.harness import leaks, truth
from faults.harness.actions import ACTIONS, Undo
from faults.harness.asking import Asker
from faults.harness.schedule import Schedule, Step, plan_text
from faults.harness.world import World
from support.agents import wait_for

DRAIN_S = 300.0
STILL_S = 90.0
"""How long nothing may move before what is missing is not waited for any more: the longest pause of any part, and then some."""
ENDED = {"done", "stopped", "cancelled"}
MOVES = ("running", "state", "plans", "run", "tokens", "backlog_bytes", "runs")
GROWS = ("runs", "runs where ended", "blocks", "artifacts where state <> 'awaited'")


@dataclass(slots=True)
class Result:
    """What came of it."""

    schedule: Schedule
    problems: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    runs: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    frames: int = 0
    gaps: int = 0
    held: dict[str, Any] = field(default_factory=dict)
    took_s: float = 0.0
    spent_s: dict[str, float] = field(default_factory=dict)  # by part of the play
    kept: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The JSON line."""
        asked = self.schedule
        return {
            "seed": asked.seed,
            "scale": asked.scale,
            "database": asked.database,
            "phones": asked.phones,
            "wifi": list(asked.wifi),
            "small": list(asked.small),
            "faults": self.done,
            "ok": not self.problems,
            "problems": self.problems,
            "runs": self.runs,
            "outcomes": self.outcomes,
            "frames": self.frames,
            "gaps": self.gaps,
            "held": self.held,
            "spent_s": {name: round(spent, 1) for name, spent in self.spent_s.items()},
            "took_s": round(self.took_s, 1),
            "kept": self.kept,
        }


def play(schedule: Schedule, keep: Path | None = None, plant: str = "") -> Result:
    """Play one schedule. With problems, the phones' homes, logs and database are kept in `keep`."""
    result = Result(schedule)
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"bmoe-f{schedule.seed}-"))
    world = None
    try:
        with _spent(result, "set up"):
            world = World(folder, schedule, plant)
            world.start()
            before = _first_look(world)
            _hand_over(world)
        _play(world, result, before)
    except Exception as error:
        result.problems.append(f"the play broke off: {type(error).__name__}: {error}")
        result.held["traceback"] = traceback.format_exc()[-3000:]
    finally:
        if result.problems and keep is not None:  # before disks are unmounted
            with contextlib.suppress(OSError, shutil.Error):
                _keep(folder, keep / f"seed-{schedule.seed}", result)
        with _spent(result, "close"):
            if world is not None:
                world.close()
            shutil.rmtree(folder, ignore_errors=True)
    result.took_s = time.monotonic() - began
    return result


@contextlib.contextmanager
def _spent(result: Result, part: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        result.spent_s[part] = time.monotonic() - began


def _play(world: World, result: Result, before: dict[str, leaks.Held]) -> None:
    schedule = world.schedule
    with _spent(result, "faults"):
        _faults(world, schedule.steps, result)
    with _spent(result, "drain"):
        drained = _drained(world)
    if not drained:
        world.stacks()
        waited_s = result.spent_s["drain"]
        result.problems.append(f"not drained {waited_s:.0f} s after everything was healed: {_states(world)}")
    _count(world, result)
    phones = [truth.Phone(phone.agent.uuid.hex(), phone.copies, phone.harmed) for phone in world.phones]
    cells = [cell.name for cell in schedule.cells]
    with _spent(result, "truth"):
        result.problems += truth.check(world.database, phones, cells, world.artifacts)
    with _spent(result, "leaks"):
        result.problems += _leaks(world, before, result)
    result.problems += world.unasked


def _hand_over(world: World) -> None:
    plan = world.folder / "plan.toml"
    plan.write_text(plan_text(world.schedule))
    assert world.typed is not None
    sent = json.loads(world.typed("run", str(plan), "--all", "--detach", "--json"))
    assert len(sent["phones"]) == len(world.phones), sent
    world.typed.close()


def _faults(world: World, steps: tuple[Step, ...], result: Result) -> None:
    """Do and take back, in the schedule's order: its clock stands while something is done or late, so that on a slow machine
    no fault comes before one of the same part is taken back."""
    began = time.monotonic()
    stood = 0.0
    number = itertools.count()
    due: list[tuple[float, int, str, Callable[[], Undo | None], float]] = []
    for step in steps:
        action = ACTIONS[step.fault]
        heapq.heappush(due, (step.at_s, next(number), str(step), lambda a=action, s=step: a(world, s), step.hold_s))
    while due:
        at_s, _, name, act, hold_s = due[0]
        if (left := at_s - (time.monotonic() - began - stood)) > 0:
            world.tend()
            time.sleep(min(left, 0.1))
            continue
        heapq.heappop(due)
        undo = act()
        stood = time.monotonic() - began - at_s
        if hold_s >= 0:
            result.done.append(name)
        if undo is not None:
            heapq.heappush(due, (at_s + max(hold_s, 0), next(number), name, lambda u=undo: u(), -1.0))


def _first_look(world: World) -> dict[str, leaks.Held]:
    """What everything holds when all phones are followed and nothing was measured yet."""
    wait_for(lambda: _followed(world), "the collector to follow all phones", 60)
    assert world.collector is not None
    last = None
    for _ in range(20):
        now = leaks.look(world.collector.pid, world.database)
        if last is not None and (now.descriptors, now.threads) == (last.descriptors, last.threads):
            break
        last = now
        time.sleep(0.4)
    found = {"collector": leaks.look(world.collector.pid, world.database)}
    for phone in world.phones:
        assert phone.agent.process is not None
        found[f"agent {phone.number}"] = leaks.look(phone.agent.process.pid)
    return found


def _followed(world: World) -> bool:
    """Whether the collector that runs now has the lease of every phone and a way to it.

    The way is a forward, or the connection that stood when somebody removed the forward and stands still.
    """
    world.tend()
    assert world.collector is not None
    held = world.database.rows("select holder from leases where name like 'phone:%'")
    mine = [row for row in held if f":{world.collector.pid}:" in row["holder"]]
    forwards = world.server.adb("forward", "--list")
    ways = [f"localabstract:{phone.agent.socket}\n" in forwards or phone.connected() for phone in world.phones]
    return len(mine) == len(world.phones) and all(ways)


def _drained(world: World) -> bool:
    """Wait until every phone has ended its plan and everything of it is acknowledged, for as long as anything moves."""
    began = moved = time.monotonic()
    before: list[object] = []
    with contextlib.ExitStack() as stack:
        left = [stack.enter_context(contextlib.closing(Asker(phone))) for phone in world.phones]
        while (now := time.monotonic()) < min(moved + STILL_S, began + DRAIN_S):
            world.tend()
            said = [(asker, asker.status()) for asker in left]
            left = [asker for asker, told in said if not _done(told)]
            if not left and _settled(world):
                return True
            if (seen := [[told.get(key) for key in MOVES] for _, told in said] + _stored(world)) != before:
                before, moved = seen, now
            time.sleep(0.2)
    return False


def _done(said: dict[str, Any]) -> bool:
    plans = [plan["state"] for plan in said.get("plans", [])]
    return bool(plans) and all(state in ENDED for state in plans) and said["backlog_bytes"] == 0


def _stored(world: World) -> list[object]:
    """What grows while something comes."""
    with contextlib.suppress(Exception):  # a server that comes up again
        return [world.database.rows(f"select count(*) as n from {what}") for what in GROWS]
    return []


def _settled(world: World) -> bool:
    """Nothing that the database still waits for."""
    rows = world.database.rows(
        "select (select count(*) from runs where not ended) + (select count(*) from artifacts where state = 'awaited') as n"
    )
    return int(rows[0]["n"]) == 0


def _states(world: World) -> str:
    found = []
    for phone in world.phones:
        done = phone.agent.run("status", "--json", check=False)
        found.append(done.stdout.strip() or done.stderr.strip()[-300:])
    return "; ".join(found) + " | " + world.log_tail()


def _count(world: World, result: Result) -> None:
    for row in world.database.rows("select outcome, count(*) as n from runs group by outcome"):
        result.outcomes[row["outcome"]] = row["n"]
    result.runs = sum(result.outcomes.values())
    result.frames = int(world.database.rows("select coalesce(sum(frames), 0) as n from blocks")[0]["n"])
    result.gaps = int(world.database.rows("select count(*) as n from gaps")[0]["n"])


def _leaks(world: World, before: dict[str, leaks.Held], result: Result) -> list[str]:
    """Descriptors, threads and memory of what runs; then what is left when it was told to end."""
    problems = []
    try:
        wait_for(lambda: _followed(world), "the collector to follow all phones", 60)
    except AssertionError as error:
        problems.append(f"after everything: {error}")
    assert world.collector is not None
    agents = [(phone.number, phone.agent.process) for phone in world.phones]
    looks = [("collector", world.collector.pid, leaks.COLLECTOR, world.database)]
    looks += [(f"agent {number}", process.pid, leaks.AGENT, None) for number, process in agents if process is not None]
    for name, pid, slack, database in looks:
        held, found = leaks.settle(pid, before[name], slack, world.tend, database)
        result.held[name] = [before[name].as_dict(), held.as_dict()]
        problems += [f"{name} leaks {each}" for each in found]
    with contextlib.suppress(AssertionError):  # what is still there after that is told below
        wait_for(lambda: not _parts(world) and not any(_kept(world, phone.number) for phone in world.phones), "", 20)
    world.collector_wanted = False
    world.collector.send_signal(signal.SIGTERM)
    try:
        if code := world.collector.wait(60):
            problems.append(f"the collector ended with {code} on SIGTERM: {world.log_tail()}")
    except subprocess.TimeoutExpired:
        problems.append("the collector did not end within 60 s of SIGTERM")
    if left := world.server.adb("forward", "--list").strip():
        problems.append(f"forwards left: {left}")
    if folders := [path.name for path in world.shelf.runtime.glob("bmoe-fleet/*-*")]:
        problems.append(f"folders of forwards left: {folders}")
    if held := world.database.rows("select name, holder from leases where until_wall_ns > 0"):
        problems.append(f"leases left: {held}")
    with contextlib.suppress(AssertionError):  # a backend that was busy notices a moment later that its client has gone
        wait_for(lambda: not world.database.connections(), "", 10)
    if clients := world.database.connections():
        problems.append(f"connections to the database left: {clients}")
    if parts := _parts(world):
        problems.append(f"parts of files left: {parts}")
    for phone in world.phones:
        phone.agent_wanted = False
        if (code := phone.agent.stop()) != 0:
            problems.append(f"the agent of phone {phone.number} ended with {code} on SIGTERM")
        if kept := _kept(world, phone.number):
            problems.append(f"phone {phone.number} still keeps runs {kept}")
    # a phone's shell notices at its next word that nobody listens any more
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not world.processes(), "all processes to end", 15)
    if running := world.processes():
        problems.append(f"processes left: {running}")
    return problems


def _parts(world: World) -> list[str]:
    return [path.name for path in (world.host.folder / "data").rglob("*.part")]


def _kept(world: World, number: int) -> list[str]:
    return [path.name[:8] for path in (world.phones[number].agent.home / "spool").glob("?" * 32)]


def _keep(folder: Path, target: Path, result: Result) -> None:
    """What a person needs to find out why."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(
        folder, target, symlinks=True, ignore=shutil.ignore_patterns("*.gguf", "filler", "reserve"), dirs_exist_ok=True
    )
    result.kept = str(target)
