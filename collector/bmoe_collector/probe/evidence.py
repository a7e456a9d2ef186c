"""Looking into a phone's log for who killed a run: what is asked of its shell, and the notes that come of it.

In: an ended run and what the shell answered. Out: host notes: a `kill_evidence` for every line that names the engine or its agent in
the run's window, and one `kill_search` that says what could be searched. Pure but for the caller's shell.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from bmoe_collector.probe import killlog
from bmoe_collector.probe.rows import KILL, SEARCHED, EndedRun, HostNote

BEFORE_NS = 5_000_000_000
AFTER_NS = 120_000_000_000
"""A log is written late, and an agent notices an end later still."""
_WORDS = (
    "am_kill|am_proc_died|am_freeze|am_unfreeze|killinfo|lowmemorykiller|lmkd|phantom|freezing|oom_reaper|killed process|"
    "out of memory|killing |kill '|force stopping|excessive cpu|has died|^--------- |^#rc "
)
_STATUS = re.compile(r"^#rc (\w+) (\d+)$", re.MULTILINE)
_BUFFERS = {"log": "events,system,main,crash", "kernel": "kernel"}


def command(run: EndedRun) -> str:
    """One pipeline for adb's shell: the log from the run's start on, the kernel's, only lines that may matter."""
    since = max(0, run.begin_wall_ns - BEFORE_NS) / 1e9
    parts = [
        f"logcat -d -b {buffers} -v epoch -T {since:.3f}; echo '#rc {name}' $?" for name, buffers in _BUFFERS.items()
    ]
    parts.append("dmesg; echo '#rc dmesg' $?")
    return (
        f'{{ {"; ".join(parts)}; }} 2>&1 </dev/null | grep -iE "{_WORDS}|not found|denied|not permitted" | tail -n 3000'
    )


BEGINNING = "logcat -d -b system -v epoch 2>/dev/null </dev/null | head -n 3"


def search(run: EndedRun, boot_id: str, ask: Callable[[str], str]) -> list[HostNote]:
    """Ask the phone's shell and make the notes. Raises what `ask` raises: then the run stays unsearched."""
    if run.boot_id and boot_id and run.boot_id != boot_id:
        text = "the phone has restarted since: its log of that time is gone"
        return [HostNote(SEARCHED, text, {"lines": 0, "found": 0}, run.end_boot_ns)]
    said = ask(command(run))
    found = list(killlog.lines(said))
    begin, end = run.begin_wall_ns - BEFORE_NS, run.end_wall_ns + AFTER_NS
    kills = killlog.kills(found, run.pids, begin, end)
    status = {name: int(code) for name, code in _STATUS.findall(said)}
    failed = sorted(name for name in ("log", "kernel", "dmesg") if status.get(name, 255))
    problems = [
        line.strip()
        for line in said.splitlines()
        if re.search(r"not found|denied|not permitted", line, re.IGNORECASE)
        and not any(line.strip() == one.raw for one in found)
    ][:6]
    begins = killlog.first_wall_ns(killlog.lines(ask(BEGINNING))) if "log" not in failed else None
    notes = [
        HostNote(
            KILL,
            killlog.sentence(kill),
            {
                "kind": kill.kind,
                "pid": kill.pid,
                "process": kill.process,
                "reason": kill.reason,
                "wall_ns": kill.wall_ns,
            },
            run.end_boot_ns,
        )
        for kill in kills
    ]
    facts = {
        "pids": list(run.pids),
        "lines": len(found),
        "found": len(kills),
        "unreadable": failed,
        "problems": problems,
        "log_begins_wall_ns": begins,
    }
    return [*notes, HostNote(SEARCHED, _told(len(kills), failed, begins, run), facts, run.end_boot_ns)]


def _told(found: int, failed: list[str], begins: int | None, run: EndedRun) -> str:
    if "log" in failed:
        return "the phone's log cannot be read from adb's shell: who ended this run is not known"
    text = (
        f"the phone's log has {found} lines about the engine's or the agent's end"
        if found
        else "the phone's log names no killer of this run"
    )
    if begins is not None and begins > run.end_wall_ns:
        text += "; it begins after the run's end, what came before is gone"
    return text
