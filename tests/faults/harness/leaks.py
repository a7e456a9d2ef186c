"""What a process holds, before and after: descriptors, threads, memory, connections to its database.

In: a pid, and the database if it uses one. Out: `Held`; `beyond` says what of a second one is more than a first one explains.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

SETTLE_S = 10.0
POOL = 5
"""Connections that SQLAlchemy's pool keeps open when nobody uses them; how many it has made by then is chance."""


class Pool(Protocol):
    """A database that knows what a process holds of it."""

    def held(self, pid: int) -> tuple[int, int]:
        """Connections that the process has open, and the descriptors that they take."""


@dataclass(frozen=True, slots=True)
class Held:
    """One look at a process."""

    descriptors: int  # those of connections not counted
    threads: int
    rss_mib: float
    connections: int = 0

    def as_dict(self) -> dict[str, float]:
        """For the record."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Slack:
    """How much more a healthy process may hold after faults than before its first run.

    Descriptors and threads: gRPC's pollers, one more pass of a loop. Memory: modules that are imported when they are
    first needed, and what Python's allocator keeps.
    """

    descriptors: int
    threads: int
    rss_mib: float


COLLECTOR = Slack(3, 3, 60.0)
AGENT = Slack(2, 3, 15.0)


def look(pid: int, database: Pool | None = None) -> Held:
    """What a process holds now. Raises OSError when it is gone."""
    connections, taken = database.held(pid) if database is not None else (0, 0)
    status = Path(f"/proc/{pid}/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    rss_mib = round(int(values["VmRSS"].split()[0]) / 1024, 1)
    return Held(descriptors - taken, int(values["Threads"]), rss_mib, connections)


def beyond(before: Held, after: Held, slack: Slack) -> list[str]:
    """What grew by more than it may."""
    found = []
    for name in ("descriptors", "threads", "rss_mib"):
        grown = getattr(after, name) - getattr(before, name)
        if grown > getattr(slack, name):
            found.append(f"{name} {getattr(before, name)} before, {getattr(after, name)} after")
    if after.connections > POOL:
        found.append(f"connections {before.connections} before, {after.connections} after")
    return found


def settle(
    pid: int, before: Held, slack: Slack, tend: Callable[[], None], database: Pool | None = None
) -> tuple[Held, list[str]]:
    """Look until it holds no more than before, or for `SETTLE_S`."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        held = look(pid, database)
        found = beyond(before, held, slack)
        if not found or time.monotonic() > deadline:
            return held, found
        tend()
        time.sleep(0.25)
