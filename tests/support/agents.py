"""Agents as the processes they are, without adb: init, serve, SIGKILL, restart.

A test that needs a phone's transport too uses `support.phones`, whose phones hold one of these each.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

BIN = Path(sys.executable).parent
START_S = 60.0


def wait_for(condition: Callable[[], object], what: str, within_s: float = START_S) -> object:
    """Return the first true value of `condition`; fail with `what` when it never comes."""
    deadline = time.monotonic() + within_s
    while True:
        if value := condition():
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{within_s:g} s passed without: {what}")
        time.sleep(0.05)


def make_model(folder: Path, name: str = "tiny.gguf", size_mib: int = 4) -> Path:
    """A small valid model file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    command = [str(BIN / "bmoe-sim"), "--make-model", str(path), "--size-mib", str(size_mib)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return path


def make_engine(folder: Path, settings: str, name: str = "engine") -> Path:
    """An executable that is the stand-in engine with settings of its own (bmoe_sim's BMOE_SIM)."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    # a cell's own settings come after the engine's and stand over them
    path.write_text(f'#!/bin/sh\nBMOE_SIM="{settings}${{BMOE_SIM:+,$BMOE_SIM}}" exec {BIN / "bmoe-sim"} "$@"\n')
    path.chmod(0o755)
    return path


class Agent:
    """One `bmoe-agent` in a home of its own. `prefix` goes before every argv (a network namespace)."""

    def __init__(self, home: Path, prefix: Sequence[str] = (), env: dict[str, str] | None = None) -> None:
        self.home = home
        self.prefix = list(prefix)
        self.env = {**os.environ, "BMOE_AGENT_HOME": str(home), **(env or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self.program = [str(BIN / "bmoe-agent")]
        self.secret_hex = ""
        self.log = home.with_name(home.name + ".log")

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run one `bmoe-agent` command to its end."""
        command = [*self.prefix, str(BIN / "bmoe-agent"), *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120, check=False)
        if check and done.returncode:
            raise AssertionError(f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def init(self, engine: Path, models: Path, name: str = "phone") -> None:
        """Make the home; the secret is shown once and kept here."""
        done = self.run("init", "--engine", str(engine), "--models", str(models), "--name", name)
        shown = re.findall(r"\b[0-9a-f]{64}\b", done.stdout + done.stderr)
        self.secret_hex = shown[0] if shown else (self.home / "secret").read_text().strip()

    @property
    def uuid(self) -> bytes:
        return bytes.fromhex((self.home / "uuid").read_text().strip())

    @property
    def secret(self) -> bytes:
        return bytes.fromhex((self.home / "secret").read_text().strip())

    @property
    def socket(self) -> str:
        return f"bmoe-agent-{self.uuid.hex()[:12]}"

    def launch(self) -> None:
        """Start to serve, without waiting for anything."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, *self.program, "serve"], env=self.env, stdout=log, stderr=log
            )

    def start(self) -> None:
        """Serve, and return when the socket is there."""
        self.launch()
        wait_for(lambda: self.serving() or self._died(), "the agent's socket")
        self._must_live()

    def serving(self) -> bool:
        assert self.process is not None
        with contextlib.suppress(OSError):
            return f"@{self.socket}\n" in Path(f"/proc/{self.process.pid}/net/unix").read_text()
        return False

    def _died(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def _must_live(self) -> None:
        if self._died():
            raise AssertionError(f"the agent ended: {self.log.read_text()[-4000:]}")

    def signal(self, number: int) -> None:
        """Send the agent alone a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, as a phone does it: the engine lives on."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> int:
        """SIGTERM and wait; what still runs after 30 s is killed."""
        if self.process is None:
            return 0
        self.process.terminate()
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self.process = None

    def engines(self) -> list[int]:
        """Processes that work inside this agent's home: engines and their launchers."""
        mark = os.path.realpath(self.home) + "/"
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{entry}/cwd").startswith(mark):
                        found.append(int(entry))
        return found

    def destroy(self) -> None:
        """Leave nothing running: the agent, then whatever it started."""
        self.kill()
        for pid in self.engines():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


@contextlib.contextmanager
def agent(
    folder: Path, settings: str = "tok_s=50,load_s=0.1,prefill_s=0.1", prefix: Sequence[str] = (), name: str = "phone"
) -> Iterator[Agent]:
    """An initialised agent that is not started yet, with a model `tiny.gguf` and an engine of those settings."""
    made = Agent(folder / "home", prefix)
    model = make_model(folder / "models")
    made.init(make_engine(folder, settings), model.parent, name)
    try:
        yield made
    finally:
        made.destroy()
