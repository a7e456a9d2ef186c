"""Where the simulator's bytes go: stdout, its independent copy, and the files it writes.

Comes in: whole lines. Goes out: one write(2) for each, so that a killed simulator leaves whole rows, as the engine
does by flushing each. The copy (BMOE_SIM copy=DIR) is written after stdout, so it may lack what was written in the
instant of a SIGKILL from outside, and never holds more. It is `DIR/<boot ns>-<pid>.stdout`, beside it
`<boot ns>-<pid>.json` with `argv`, `pid` and `cwd`.
"""

import json
import os
import sys
import time


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Output:
    """stdout and its copy."""

    def __init__(self, copy: str, argv: list[str]) -> None:
        self._copy = -1
        self._note = ""
        if copy:
            os.makedirs(copy, exist_ok=True)
            clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
            stem = os.path.join(copy, f"{time.clock_gettime_ns(clock):020d}-{os.getpid()}")
            self._copy = os.open(stem + ".stdout", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(stem + ".json", "w", encoding="utf-8") as f:
                json.dump({"argv": argv, "pid": os.getpid(), "cwd": os.getcwd()}, f)

    def write(self, data: bytes) -> None:
        """Write and flush. A full disk loses output, as stdio does; a closed pipe ends the process by SIGPIPE."""
        try:
            _write_all(1, data)
        except OSError as e:
            complain(f"bmoe-sim: stdout: {os.strerror(e.errno or 0)}")
        if self._copy >= 0:
            _write_all(self._copy, data)


class Sink:
    """A file of whole rows: a metrics CSV or a trace."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def write(self, text: str) -> None:
        """Write one or more whole rows at once."""
        if self._fd < 0:
            return
        try:
            _write_all(self._fd, text.encode("utf-8", "surrogateescape"))
        except OSError as e:
            complain(f"bmoe-sim: {self._path}: {os.strerror(e.errno or 0)}; writing no more of it")
            os.close(self._fd)
            self._fd = -1


def open_sink(path: str, what: str) -> Sink | None:
    """Open a sink, or warn and go on without it, as the engine does."""
    if not path:
        return None
    try:
        return Sink(path)
    except OSError:
        complain(f"warning: could not open {what} {path}")
        return None


def complain(text: str) -> None:
    """A line on stderr."""
    try:
        sys.stderr.buffer.write(text.encode("utf-8", "surrogateescape") + b"\n")
        sys.stderr.buffer.flush()
    except OSError:
        pass  # nobody is left to read it
