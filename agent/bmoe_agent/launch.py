r"""Starting the engine so that it needs nobody afterwards, and finding it again.

In: an argv, an environment, the run's directory. Out: a `Process` (pid and start ticks: together they name one process
until the next boot) and later an `ExitStatus`. `LaunchError` says why an engine could not be started.

The engine runs under a fixed few-line `sh` script in a session and process group of its own. Everything it is given
arrives as `"$@"`, never as text for a shell to parse. In the run's directory:

    stdout, stderr   what the engine wrote; files, so the engine never waits for the agent
    stdin            not a file: /dev/null, or for a session a pipe whose other end the agent holds
    pid              "<pid> <the whole of /proc/self/stat>\n", written by the shell that becomes the engine by exec, so
                     pid and start ticks are the engine's own
    status           "exit <n>\n", written by the script when the engine has ended; n > 128 is a signal as shells say it
    launcher         what the script's shell itself had to say ("Segmentation fault"), apart from the engine's stderr

`pid` and `status` are made beforehand, filled with blanks and written in place, so that a full disk can still hold
them. Nothing but blanks in `status` means the exit was not observed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from bmoe_proto.asking import variable_problem

ARGUMENT_LIMIT = 128 << 10  # the kernel's MAX_ARG_STRLEN: 32 pages of 4 KiB, the ending NUL included
PROC = Path("/proc")
_SPARE_BYTES = 1024
LAUNCHER_LOG = "launcher"
_SCRIPT = """\
cd "$1" || exit 125
shift
trap : HUP INT TERM
sh -c 'read -r stat </proc/self/stat; exec >stdout 2>stderr; echo "$$ $stat" 1<>pid; exec "$@"' engine "$@"
status=$?
echo "exit $status" 1<>status
"""
_PASSED_ON = ("PATH", "HOME", "TMPDIR", "PREFIX", "ANDROID_ROOT", "ANDROID_DATA")
_PID_DEADLINE_S = 20.0
_EXEC_DEADLINE_S = 1.0


class LaunchError(Exception):
    """The engine could not be started; `code` is short and for machines, the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Process:
    """One process until the next boot."""

    pid: int
    start_ticks: int  # field 22 of /proc/<pid>/stat
    session_id: int = field(default=0, compare=False)  # field 6: the launcher's pid; 0 when not known


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How the engine ended, as its launcher saw it: a code or a signal."""

    code: int | None
    signal: int | None


@dataclass(slots=True)
class Launched:
    """A started engine: who it is, and the pipe to a session's stdin."""

    process: Process
    launcher: subprocess.Popen[bytes]
    stdin: IO[bytes] | None


def clean_environment(
    given: Mapping[str, str], *, ld_library_path: str = "", base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The engine's whole environment: a few variables passed on, and what the cell asks for.

    An engine reads settings from the environment where flags are absent (generations.md), so nothing else gets in.
    LD_LIBRARY_PATH comes from the engine's configuration only. Raises `LaunchError`.
    """
    source = os.environ if base is None else base
    environment = {key: source[key] for key in _PASSED_ON if key in source}
    environment["LC_ALL"] = "C.UTF-8"
    for key, value in given.items():
        if why := variable_problem(key, value):
            raise LaunchError("bad_environment", why)
        environment[key] = value
    if ld_library_path:
        environment["LD_LIBRARY_PATH"] = ld_library_path
    return environment


def check_size(argv: Sequence[bytes], environment: Mapping[str, str]) -> None:
    """Refuse what the kernel would refuse with E2BIG. Raises `LaunchError` with code `argv_too_long`."""
    for index, argument in enumerate(argv):
        if b"\0" in argument:
            raise LaunchError("bad_argument", f"argument {index} holds a NUL byte and cannot be given to a program")
        if len(argument) >= ARGUMENT_LIMIT:
            raise LaunchError(
                "argv_too_long",
                f"argument {index} is {len(argument)} bytes; a program can be given less than {ARGUMENT_LIMIT} in one "
                "argument: write the prompt as a session turn",
            )
    variables = sum(len(key) + len(value.encode()) + 2 + 8 for key, value in environment.items())
    total = sum(len(argument) + 1 + 8 for argument in argv) + variables
    limit = os.sysconf("SC_ARG_MAX")
    if total > limit - 8192:
        raise LaunchError("argv_too_long", f"arguments and environment are {total} bytes, the system takes {limit}")


def prepare(directory: Path) -> None:
    """Make the run's directory with the spare files, durable before the launch."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in ("pid", "status"):
        with (directory / name).open("wb") as file:
            file.write(b" " * (_SPARE_BYTES - 1) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def launch(argv: Sequence[bytes], environment: Mapping[str, str], directory: Path, *, session: bool) -> Launched:
    """Start the engine. The directory was made by `prepare`. Raises `LaunchError`."""
    check_size(argv, environment)
    shell = shutil.which("sh", path=environment.get("PATH")) or "/system/bin/sh"
    try:
        with (directory / LAUNCHER_LOG).open("wb") as log:
            launcher = subprocess.Popen(
                [os.fsencode(shell), b"-c", _SCRIPT.encode(), b"launcher", os.fsencode(directory), *argv],
                stdin=subprocess.PIPE if session else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                cwd="/",
                start_new_session=True,
            )
    except OSError as error:
        code = "argv_too_long" if error.errno == 7 else "launch_failed"
        raise LaunchError(code, f"{shell}: cannot be started: {error.strerror}") from error
    deadline = time.monotonic() + _PID_DEADLINE_S
    pause_s = 0.001
    while (process := read_pid(directory)) is None:
        if launcher.poll() is not None and read_pid(directory) is None:
            _close(launcher)
            said = _tail_text(directory / LAUNCHER_LOG)
            raise LaunchError(
                "launch_failed", f"the launcher ended with {launcher.returncode} before the engine: {said}"
            )
        if time.monotonic() > deadline:
            launcher.kill()
            _close(launcher)
            raise LaunchError("launch_failed", f"no engine after {_PID_DEADLINE_S:.0f} s; the launcher was ended")
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.05)
    _await_exec(process, directory)
    return Launched(process, launcher, launcher.stdin)


def _await_exec(process: Process, directory: Path) -> None:
    """Wait until the shell has become the engine: files of /proc opened before that would be about the shell's memory.

    Its name in stat changes with exec; an engine that is called like the shell costs the whole short wait.
    """
    before = _name(_first_line(directory / "pid"))
    deadline = time.monotonic() + _EXEC_DEADLINE_S
    while time.monotonic() < deadline and alive(process):
        with contextlib.suppress(OSError):
            if _name((PROC / str(process.pid) / "stat").read_bytes()) != before:
                return
        time.sleep(0.001)


def _name(stat: bytes) -> bytes:
    return stat.partition(b"(")[2].rpartition(b")")[0]


def read_pid(directory: Path) -> Process | None:
    """The engine's pid and start ticks from the `pid` file; None when there is none (yet)."""
    text = _first_line(directory / "pid")
    match = re.match(rb"(\d+) (\d+ \(.*\) .*)", text, re.DOTALL)
    if not match:
        return None
    return _process(int(match[1]), match[2])


def read_status(directory: Path) -> ExitStatus | None:
    """How the engine ended; None when no exit was recorded. Above 128 it is a signal, as shells report it."""
    match = re.fullmatch(rb"exit (\d+)", _first_line(directory / "status"))
    if not match:
        return None
    value = int(match[1])
    if value > 128 and value - 128 < signal.NSIG:
        return ExitStatus(None, value - 128)
    return ExitStatus(value, None)


def alive(process: Process, proc: Path = PROC) -> bool:
    """Whether exactly this process still runs; a zombie does not."""
    try:
        stat = (proc / str(process.pid) / "stat").read_bytes()
    except OSError:
        return False
    return _process(process.pid, stat) == process and not _ended(stat)


def send_signal(process: Process, number: signal.Signals, proc: Path = PROC) -> bool:
    """Signal this process and nothing else; False when it is gone. Its launcher lives on to write the status."""
    if not alive(process, proc):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def work_done(process: Process, proc: Path = PROC) -> tuple[float | None, int | None]:
    """CPU seconds and bytes read since the engine's start: signs of life of an engine that prints nothing."""
    directory = proc / str(process.pid)
    cpu_s: float | None = None
    read_bytes: int | None = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = (directory / "stat").read_bytes().rpartition(b")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    with contextlib.suppress(OSError, ValueError):
        # Reads through system calls, and what page faults fetched from storage.
        read_bytes = sum(
            int(value)
            for key, _, value in (line.partition(b": ") for line in (directory / "io").read_bytes().splitlines())
            if key in {b"rchar", b"read_bytes"}
        )
    return cpu_s, read_bytes


def session_alive(process: Process, proc: Path = PROC) -> bool:
    """Whether the launcher of this engine still runs, and so will write its status."""
    if not process.session_id:
        return False
    try:
        stat = (proc / str(process.session_id) / "stat").read_bytes()
    except OSError:
        return False
    launcher = _process(process.session_id, stat)
    return launcher is not None and launcher.session_id == process.session_id and not _ended(stat)


def end(process: Process, *, grace_s: float, proc: Path = PROC) -> bool:
    """SIGTERM, then SIGKILL after the grace; False when the process is still there some seconds later."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not send_signal(process, number, proc):
            return True
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline:
            if not alive(process, proc):
                return True
            time.sleep(0.05)
    return not alive(process, proc)


def processes(proc: Path = PROC) -> Iterator[Process]:
    """Every process that still runs."""
    try:
        names = [name for name in os.listdir(proc) if name.isdigit()]
    except OSError:
        return
    for name in names:
        try:
            stat = (proc / name / "stat").read_bytes()
        except OSError:
            continue
        process = _process(int(name), stat)
        if process is not None and not _ended(stat):
            yield process


def _process(pid: int, stat: bytes) -> Process | None:
    """The name in parentheses may hold anything, so fields count from its last parenthesis (field 2)."""
    fields = stat.rpartition(b")")[2].split()
    try:
        return Process(pid, int(fields[19]), int(fields[3]))
    except (IndexError, ValueError):
        return None


def _ended(stat: bytes) -> bool:
    return stat.rpartition(b")")[2].split()[:1] in ([b"Z"], [b"X"])


def _first_line(path: Path) -> bytes:
    """A blank-filled file's first line; empty while it is not whole."""
    try:
        line, end, _ = path.read_bytes().partition(b"\n")
    except OSError:
        return b""
    return line.strip() if end else b""


def _tail_text(path: Path) -> str:
    try:
        return path.read_bytes()[-500:].decode("utf-8", "replace").strip() or "it said nothing"
    except OSError:
        return "it said nothing"


def _close(launcher: subprocess.Popen[bytes]) -> None:
    if launcher.stdin is not None:
        with contextlib.suppress(OSError):
            launcher.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(timeout=5)
