"""What a process holds, before and after: descriptors, threads, memory.

In: a pid. Out: `Held`; `beyond` says what of a second one is more than a first one explains.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

SETTLE_S = 10.0


@dataclass(frozen=True, slots=True)
class Held:
    """One look at a process."""

    descriptors: int
    threads: int
    rss_mib: float

    def as_dict(self) -> dict[str, float]:
        """For the record."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Slack:
    """How much more a healthy process may hold after faults than before its first run.

    Descriptors and threads: gRPC's pollers, SQLAlchemy's pool, one more pass of a loop. Memory: modules that are
    imported when they are first needed, and what Python's allocator keeps.
    """

    descriptors: int
    threads: int
    rss_mib: float


COLLECTOR = Slack(5, 3, 60.0)
AGENT = Slack(2, 3, 15.0)


def look(pid: int) -> Held:
    """What a process holds now. Raises OSError when it is gone."""
    status = Path(f"/proc/{pid}/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return Held(descriptors, int(values["Threads"]), round(int(values["VmRSS"].split()[0]) / 1024, 1))


def beyond(before: Held, after: Held, slack: Slack) -> list[str]:
    """What grew by more than it may."""
    found = []
    for name in ("descriptors", "threads", "rss_mib"):
        grown = getattr(after, name) - getattr(before, name)
        if grown > getattr(slack, name):
            found.append(f"{name} {getattr(before, name)} before, {getattr(after, name)} after")
    return found


def settle(pid: int, before: Held, slack: Slack, tend: Callable[[], None]) -> tuple[Held, list[str]]:
    """Look until it holds no more than before, or for `SETTLE_S`."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        held = look(pid)
        found = beyond(before, held, slack)
        if not found or time.monotonic() > deadline:
            return held, found
        tend()
        time.sleep(0.25)
