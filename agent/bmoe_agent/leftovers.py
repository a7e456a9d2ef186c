"""Processes that an engine left behind, and engines that nobody watches.

In: a run's directory or the home of all of them, /proc. Out: who still writes there, or runs one of our programs. What was
started for a run is known by where its output goes, whatever it is called, whichever session it went to and wherever it
works; a shell that somebody took into a run's directory is nobody's engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from bmoe_agent.launch import LAUNCHER_LOG, PROC, Process, processes


def sweep(process: Process, directory: Path, proc: Path = PROC, *, just_ended: bool = True) -> list[int]:
    """SIGKILL what an ended engine left behind; the pids killed.

    That is what writes to its output files, and for an engine that has `just_ended` (later its number may be another's)
    all of the session that `launch` made. Never the launcher, which has a status to write.
    """
    inside = _inside(directory)
    killed: list[int] = []
    for other in processes(proc):
        if other.pid in {process.pid, process.session_id, os.getpid()}:
            continue
        of_session = other.session_id == process.session_id != 0 and other.start_ticks >= process.start_ticks
        if (just_ended and of_session) or _writes_to(proc / str(other.pid), inside):
            with contextlib.suppress(OSError):
                os.kill(other.pid, signal.SIGKILL)
                killed.append(other.pid)
    return killed


def find_engines(paths: Sequence[Path], home: Path, proc: Path = PROC) -> list[tuple[Process, str]]:
    """Live processes that write their output inside `home`, or run one of these programs: each with that directory, else
    the one it works in.

    Programs are known by exe or argv: one started through the system linker shows the linker as its exe (field notes,
    5), a script shows its interpreter.
    """
    inside = _inside(home)
    wanted = {os.path.realpath(path) for path in paths}
    found: list[tuple[Process, str]] = []
    for process in processes(proc):
        directory = proc / str(process.pid)
        output = _writes_to(directory, inside)
        # A launcher, which leads its session, ends by itself when its engine has ended.
        launcher = _name(output) == LAUNCHER_LOG if output else process.pid == process.session_id
        if launcher or process.pid == os.getpid():
            continue
        if output:
            found.append((process, os.path.dirname(output)))
        elif _runs(directory, wanted):
            working = ""
            with contextlib.suppress(OSError):
                working = os.readlink(directory / "cwd")
            found.append((process, working))
    return found


def _runs(process: Path, wanted: set[str]) -> bool:
    try:
        command = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    candidates = [os.fsdecode(argument) for argument in command[:8] if argument.startswith(b"/")]
    with contextlib.suppress(OSError):
        candidates.insert(0, os.readlink(process / "exe"))
    return any(os.path.realpath(candidate) in wanted for candidate in candidates)


def _inside(directory: Path) -> str:
    return os.path.realpath(directory).rstrip("/") + "/"


def _writes_to(process: Path, inside: str) -> str:
    """The file below `inside` that is a process's stdout or stderr; empty when neither is there."""
    for number in ("1", "2"):
        with contextlib.suppress(OSError):
            if (file := os.readlink(process / "fd" / number)).startswith(inside):
                return file
    return ""


def _name(link: str) -> str:
    return os.path.basename(link).removesuffix(" (deleted)")
