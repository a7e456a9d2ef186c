"""What all parts of one running agent share: its configuration, clocks, roots, spool, and what it is doing now.

In: a home directory. Out: a `Context`. Threads: the night thread writes `Now`, the serving threads read it; every
field is replaced whole under one lock, so a reader sees one moment.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent import config as configuration
from bmoe_agent.gates import Gates
from bmoe_agent.roots import Roots
from bmoe_agent.spool import Spool

log = logging.getLogger("bmoe_agent")

TREE_VARIABLE = "BMOE_AGENT_TREE"
"""A laid tree of some other device's /proc and /sys to sense instead of this machine's; such runs are simulated."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The phone's clocks; a boot id tells two boots' CLOCK_BOOTTIME apart."""

    boot_id: str

    @staticmethod
    def boot_ns() -> int:
        """CLOCK_BOOTTIME, the clock of the record; MONOTONIC where the platform has none."""
        return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))

    def pair(self) -> pb.ClockPair:
        """Both clocks at one moment: the narrowest of three tries."""
        best: pb.ClockPair | None = None
        for _ in range(3):
            before = self.boot_ns()
            wall = time.time_ns()
            width = self.boot_ns() - before
            if best is None or width < best.uncertainty_ns:
                best = pb.ClockPair(
                    boot_ns=before + width // 2, wall_ns=wall, uncertainty_ns=max(1, width), boot_id=self.boot_id
                )
        assert best is not None
        return best


@dataclass(frozen=True, slots=True)
class Now:
    """What the agent is doing at this moment, for status and for what may cross the wire (law 7)."""

    state: str = "idle"  # "idle", "gating", "loading", "measuring", "between", "stopping"
    plan_id: str = ""
    plan_name: str = ""
    cell: str = ""
    cell_index: int = 0
    cells: int = 0
    run_id: bytes = b""
    phase: str = ""
    tokens: int = 0
    tok_s: float | None = None
    send_during_cells: bool = False
    sample: pb.Sample | None = None

    @property
    def measuring(self) -> bytes:
        """The run being measured; empty when backlog and artifacts may be sent."""
        return self.run_id if self.state in {"loading", "measuring"} else b""


@dataclass(slots=True)
class Context:
    """One running agent."""

    config: configuration.Config
    roots: Roots
    clock: Clock
    spool: Spool
    gates: Gates
    stop: threading.Event = field(default_factory=threading.Event)
    device: pb.DeviceFacts = field(default_factory=pb.DeviceFacts)
    told: dict[str, pb.Note] = field(default_factory=dict)  # what hosts told, newest by code
    _now: Now = field(default_factory=Now)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _wakes: int = 0
    config_lock: threading.Lock = field(default_factory=threading.Lock)  # who replaces `config` holds it
    _config_stamp: int = 0

    @property
    def home(self) -> Path:
        """The agent's home directory."""
        return self.config.home

    def run_directory(self, run_id: bytes) -> Path:
        """The directory of a run, where its engine works: the engine's output and artifacts."""
        return Path(self.spool.files_directory(run_id))

    def run_of_directory(self, directory: str) -> bytes:
        """The run whose directory this is (a process's working directory); empty when it is none of ours."""
        path = Path(directory)
        try:
            inside = path.relative_to(os.path.realpath(self.spool.root))
            return bytes.fromhex(inside.parts[0])
        except (ValueError, IndexError):
            return b""

    @property
    def now(self) -> Now:
        """This moment."""
        with self._lock:
            return self._now

    def set_now(self, **changes: Any) -> None:
        """Change what the agent is doing."""
        with self._lock:
            self._now = replace(self._now, **changes)

    def wake(self) -> None:
        """Make whoever pauses look again."""
        with self._wake:
            self._wakes += 1
            self._wake.notify_all()

    def refresh_config(self) -> None:
        """Take up what was written to config.toml since; what cannot be read leaves things as they are."""
        with self.config_lock:
            try:
                stamp = (self.home / "config.toml").stat().st_mtime_ns
                if stamp != self._config_stamp:
                    self.config = configuration.load(self.home)
                    self._config_stamp = stamp
            except (OSError, configuration.ConfigError) as error:
                log.warning("config.toml is not taken up: %s", error)

    @property
    def wakes(self) -> int:
        """How often `wake` was called: to be read before one looks whether there is anything to do."""
        with self._wake:
            return self._wakes

    def pause(self, seconds: float, since: int | None = None) -> None:
        """Sleep at most so long; shorter when woken (after `wakes` was `since`, when given) or told to stop."""
        with self._wake:
            if seconds > 0 and not self.stop.is_set() and since in {None, self._wakes}:
                self._wake.wait(seconds)

    def ask_to_stop(self) -> None:
        """Stop this agent; a running engine goes on and is adopted by the next one."""
        self.stop.set()
        self.wake()

    def free_bytes(self) -> int:
        """Free space where the record lies."""
        state = os.statvfs(self.home)
        return state.f_bavail * state.f_frsize


def roots_here() -> Roots:
    """This machine's /proc and /sys, or the tree that BMOE_AGENT_TREE names."""
    tree = os.environ.get(TREE_VARIABLE)
    return Roots.from_tree(Path(tree)) if tree else Roots()


def boot_id(roots: Roots) -> str:
    """The kernel's random id of this boot, a substituted tree's when it has one."""
    node = "proc/sys/kernel/random/boot_id"
    return roots.text(node) or Roots().text(node) or ""
