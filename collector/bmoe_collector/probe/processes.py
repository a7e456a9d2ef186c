"""CPU of everything else on the phone: two listings of all processes in, shares of a core out.

A listing is many /proc/<pid>/stat files, one after the other. Ours are left out: the engine and the agent by pid, and everything
that descends from them or from the probe's own shell. Kernel threads (children of pid
2) are counted apart: kswapd and the flash driver work for the engine that is measured. A listing may show the probe's `cat`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

_LINE = re.compile(
    # pid (comm) state ppid pgrp session tty tpgid flags minflt cminflt majflt cmajflt utime stime cutime cstime priority
    # nice threads itrealvalue starttime
    rb"^(\d+) \((.*)\) (\S) (\d+) -?\d+ -?\d+ -?\d+ -?\d+ \d+ \d+ \d+ \d+ \d+ (\d+) (\d+) -?\d+ -?\d+ -?\d+ -?\d+ -?\d+ -?\d+ (\d+)",
    re.MULTILINE,
)
_OWN_COST = re.compile(rb"^\d+ \(.*\) \S(?: -?\d+){10} (\d+) (\d+) (\d+) (\d+)")
KERNEL = 2
SHOWN = 0.005
"""Share of a core from which on a process is worth its line in the record."""


@dataclass(frozen=True, slots=True)
class Process:
    """One line of a listing; ticks since the process started."""

    pid: int
    command: str
    parent: int
    ticks: int
    start_ticks: int
    line: bytes


@dataclass(frozen=True, slots=True)
class Load:
    """Shares of one core between two listings."""

    window_s: float
    busiest: float
    busiest_command: str
    busiest_pid: int
    others: float
    """All foreign processes together."""
    kernel: float
    top: tuple[tuple[str, int, float], ...]
    """Command, pid and share of the busiest."""


def listing(text: bytes) -> dict[int, Process]:
    """Every process of a listing by pid; a line that does not parse is left out."""
    found: dict[int, Process] = {}
    for match in _LINE.finditer(text):
        pid, command, _, parent, user, system, start = match.groups()
        end = text.find(b"\n", match.end())
        line = text[match.start() : end if end >= 0 else len(text)]
        name = command.decode("utf-8", "replace")
        found[int(pid)] = Process(int(pid), name, int(parent), int(user) + int(system), int(start), line)
    return found


def ours(processes: Mapping[int, Process], roots: Collection[int]) -> set[int]:
    """Pids of `roots` and of all that descend from them."""
    known = {pid for pid in roots if pid in processes}
    grown = True
    while grown:
        more = {pid for pid, process in processes.items() if process.parent in known} - known
        grown = bool(more)
        known |= more
    return known


def load(
    before: Mapping[int, Process],
    after: Mapping[int, Process],
    window_s: float,
    excluded: Collection[int],
    ticks_per_s: int = 100,
    most: int = 8,
) -> Load | None:
    """What the processes of `after` used since `before`; None without a window.

    One that is new counts from its start. One that ended in between is not seen: its CPU is in nobody's share.
    """
    if window_s <= 0 or not before:
        return None
    shares: list[tuple[float, Process]] = []
    kernel = 0.0
    for pid, now in after.items():
        if pid in excluded:
            continue
        then = before.get(pid)
        ticks = now.ticks - (then.ticks if then is not None and then.start_ticks == now.start_ticks else 0)
        share = max(0, ticks) / ticks_per_s / window_s
        if KERNEL in {pid, now.parent}:
            kernel += share
        elif share > 0:
            shares.append((share, now))
    shares.sort(key=lambda one: (-one[0], one[1].pid))
    busiest = shares[0] if shares else None
    return Load(
        window_s,
        busiest[0] if busiest else 0.0,
        busiest[1].command if busiest else "",
        busiest[1].pid if busiest else 0,
        sum(share for share, _ in shares),
        kernel,
        tuple((one.command, one.pid, share) for share, one in shares[:most] if share >= SHOWN),
    )


def own_ticks(text: bytes) -> int | None:
    """CPU ticks of the probe's shell and of the children it has waited for, from its stat."""
    match = _OWN_COST.match(text.strip())
    return sum(map(int, match.groups())) if match else None
