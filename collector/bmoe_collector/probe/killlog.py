"""The phone's log to evidence of who killed an engine or its agent. Pure.

In: text of `logcat -v epoch` (all buffers) and of `dmesg`; the pids to look for and the window. Out: `Kill`s.

Lines looked for, as Android's sources and published logs have them. **Unverified: none has been seen on a phone by this
project yet**, and vendors write their own; a line is evidence only when it names one of the pids (or, for the app's own
end, the app) inside the window.

    events  am_kill : [0,12345,com.termux,900,Trimming phantom processes]          user, pid, process, adj, reason
            am_proc_died : [0,12345,com.termux,900,19]       killinfo : [12345,10123,900,...]       am_freeze : [12345,com.termux]
    system  ActivityManager: Killing 12345:com.termux/u0a123 (adj 900): remove task
            ActivityManager: Process PhantomProcessRecord {3f2a 12345:6789:bmoe-cli/u0a123} died
            ActivityManager: Killing PhantomProcessRecord {...}: Trimming phantom processes | Excessive CPU usage
            ActivityManager: freezing 12345 com.termux
    main    lowmemorykiller: Kill 'com.termux' (12345), uid 10123, oom_score_adj 900 to free 412312kB rss, 0kB swap; reason: ...
    kernel  Out of memory: Killed process 12345 (bmoe-cli) total-vm:...    oom_reaper: reaped process 12345 (bmoe-cli), now ...
            Memory cgroup out of memory: Killed process 12345 (bmoe-cli)   lowmemorykiller: Killing 'bmoe-cli' (12345) (tgid 12345)

An epoch line is `  1700000000.123  1234  1256 I ActivityManager: text` (with `-v uid` a word more); a line of dmesg is `[12345.678901] text`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

_EPOCH = re.compile(
    r"^\s*(\d{9,11})\.(\d{3,9})\s+(?:(?:\d+|[a-z]\w*)\s+)??(\d+)\s+(\d+)\s+([VDIWEFS])\s+([^:]*?)\s*: ?(.*)$"
)
_KERNEL = re.compile(r"^(?:<\d+>)?\[\s*(\d+)\.(\d+)\]\s*(?:\[[^\]]*\]\s*)?(.*)$")
_BEGINNING = re.compile(r"^--------- beginning of (\w+)")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log. `wall_ns` is the phone's wall clock, None for a kernel line without one."""

    wall_ns: int | None
    tag: str
    text: str
    buffer: str
    raw: str


@dataclass(frozen=True, slots=True)
class Kill:
    """One line that says who ended or froze one of the processes asked for."""

    kind: str  # "phantom", "memory", "freezer", "died", "killed"
    pid: int
    process: str
    reason: str
    wall_ns: int | None
    raw: str


def lines(text: str) -> Iterator[Line]:
    """Lines of `logcat -v epoch` or `dmesg`; what is neither is left out."""
    buffer = ""
    for raw in text.splitlines():
        if match := _BEGINNING.match(raw):
            buffer = match[1]
        elif match := _EPOCH.match(raw):
            ns = int(match[1]) * 10**9 + int(match[2].ljust(9, "0"))
            yield Line(ns, match[6].strip(), match[7].strip(), buffer, raw.strip())
        elif match := _KERNEL.match(raw):
            yield Line(None, "kernel", match[3].strip(), "kernel", raw.strip())


_LIST = re.compile(r"^\[(.*)\]$")
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("phantom", re.compile(r"PhantomProcessRecord \{\S+ (?P<pid>\d+):\d+:(?P<process>[^/}]+)/[^}]*\}(?P<reason>.*)")),
    ("killed", re.compile(r"^Killing (?P<pid>\d+):(?P<process>[^/ ]+)/\S+ (?P<reason>\(adj.*)")),
    ("memory", re.compile(r"^Kill(?:ing)? '(?P<process>[^']+)' \((?P<pid>\d+)\)(?P<reason>.*)")),
    ("memory", re.compile(r"(?P<reason>.*?out of memory.*?|.*?)Kill(?:ed|ing) process (?P<pid>\d+)[ ,]+\(?(?P<process>[^),]+)\)?", re.IGNORECASE)),
    ("memory", re.compile(r"(?P<reason>oom_reaper): reaped process (?P<pid>\d+) \((?P<process>[^)]+)\)")),
    ("freezer", re.compile(r"^(?P<reason>freezing) (?P<pid>\d+) (?P<process>\S+)", re.IGNORECASE)),
    ("died", re.compile(r"^Process (?P<process>\S+) \(pid (?P<pid>\d+)\) has died(?P<reason>.*)")),
)  # fmt: skip
_PHANTOM = re.compile(r"phantom|excessive cpu", re.IGNORECASE)
_MEMORY = re.compile(r"lmk|low ?memory|out of memory|\boom\b|memory pressure|mem_pressure", re.IGNORECASE)
_FREEZER = re.compile(r"freez|frozen", re.IGNORECASE)


def kill_of(line: Line) -> Kill | None:
    """What one line says of a process' end; None when it says nothing of the kind."""
    if line.tag in {"am_kill", "am_proc_died", "am_freeze", "am_unfreeze", "killinfo"}:
        return _event(line)
    for kind, pattern in _PATTERNS:
        if match := pattern.search(line.text):
            reason = match["reason"].strip(" :,")
            return Kill(
                _kind(kind, f"{line.tag} {line.text}"),
                int(match["pid"]),
                match["process"].strip(),
                reason,
                line.wall_ns,
                line.raw,
            )
    return None


def _event(line: Line) -> Kill | None:
    found = _LIST.match(line.text)
    words = [word.strip() for word in found[1].split(",")] if found else []
    try:
        if line.tag in {"am_freeze", "am_unfreeze"}:
            return Kill("freezer", int(words[0]), words[1], line.tag, line.wall_ns, line.raw)
        if line.tag == "killinfo":
            return Kill("memory", int(words[0]), "", "lmkd", line.wall_ns, line.raw)
        reason = ", ".join(words[4:]) if line.tag == "am_kill" else "died"
        kind = _kind("killed", reason) if line.tag == "am_kill" else "died"
        return Kill(kind, int(words[1]), words[2], reason, line.wall_ns, line.raw)
    except (IndexError, ValueError):
        return None


def _kind(kind: str, text: str) -> str:
    if _PHANTOM.search(text):
        return "phantom"
    if kind != "died" and _MEMORY.search(text):
        return "memory"
    return "freezer" if kind != "died" and _FREEZER.search(text) else kind


def kills(
    found: Iterable[Line], pids: Collection[int], begin_wall_ns: int, end_wall_ns: int, *, app: str = "com.termux"
) -> list[Kill]:
    """Evidence about these pids inside the window, and about the end of the whole app, in the order of the log.

    Lines of the kernel's own log carry no wall time: they count when they name one of the pids. The same line in two buffers counts once.
    """
    evidence: dict[str, Kill] = {}
    for line in found:
        if line.wall_ns is not None and not begin_wall_ns <= line.wall_ns <= end_wall_ns:
            continue
        kill = kill_of(line)
        if kill is None:
            continue
        whole_app = line.wall_ns is not None and kill.process.split(":")[0] == app and kill.kind != "freezer"
        if kill.pid in pids or whole_app:
            evidence.setdefault(kill.raw, kill)
    return list(evidence.values())


def first_wall_ns(found: Iterable[Line]) -> int | None:
    """When the log begins: a window before it could not be searched."""
    return next((line.wall_ns for line in found if line.wall_ns is not None), None)


def sentence(kill: Kill) -> str:
    """One kill as the evidence people and `bmoe_proto.outcome` read: the log's own line.

    A line whose words do not tell the killer by themselves (`killinfo`, `am_freeze`) is said with its kind.
    """
    hints = {"memory": "low memory killer (lmkd)", "freezer": "freezer", "phantom": "phantom process killer"}
    hint = hints.get(kill.kind, "")
    told = {"memory": _MEMORY, "freezer": _FREEZER, "phantom": _PHANTOM}.get(kill.kind)
    plain = hint == "" or (told is not None and told.search(kill.raw) is not None)
    return kill.raw if plain else f"{hint}: {kill.raw}"
