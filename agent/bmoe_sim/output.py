"""Where the simulator's bytes go: stdout, its independent copy, and the files it writes.

Comes in: whole lines. Goes out: one write(2) for each, so that a killed simulator leaves whole rows, as the engine
does by flushing each. The copies (BMOE_SIM copy=DIR) are written after what they are of, so each may lack what was written
in the instant of a SIGKILL from outside, and on a disk with room never holds more. They are `DIR/<boot ns>-<pid>.stdout`
and `DIR/<boot ns>-<pid>.<name>` for each file, beside them `<boot ns>-<pid>.json` with `argv`, `pid` and `cwd`.
"""

import json
import os
import sys
import time


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _open_copy(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


class Output:
    """stdout and its copy; `copies` is what the names of this process's copies begin with, empty for none."""

    def __init__(self, copy: str, argv: list[str]) -> None:
        self._copy = -1
        self.copies = ""
        if copy:
            os.makedirs(copy, exist_ok=True)
            clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
            self.copies = os.path.join(copy, f"{time.clock_gettime_ns(clock):020d}-{os.getpid()}")
            self._copy = _open_copy(self.copies + ".stdout")
            with open(self.copies + ".json", "w", encoding="utf-8") as f:
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

    def __init__(self, path: str, copies: str = "") -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._copy = _open_copy(f"{copies}.{os.path.basename(path)}") if copies else -1

    def write(self, text: str) -> None:
        """Write one or more whole rows at once."""
        if self._fd < 0:
            return
        data = text.encode("utf-8", "surrogateescape")
        try:
            _write_all(self._fd, data)
        except OSError as e:
            complain(f"bmoe-sim: {self._path}: {os.strerror(e.errno or 0)}; writing no more of it")
            os.close(self._fd)
            self._fd = -1
        if self._copy >= 0:
            _write_all(self._copy, data)


def open_sink(path: str, what: str, copies: str = "") -> Sink | None:
    """Open a sink, or warn and go on without it, as the engine does."""
    if not path:
        return None
    try:
        return Sink(path, copies)
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
