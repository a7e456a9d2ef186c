"""A private adb server for a test: port, home and keys of its own, killable, and no other test's phones in it."""

import contextlib
import os
import random
import shutil
import socket
import subprocess
from pathlib import Path

from support.agents import wait_for

ADB = shutil.which("adb")


def free_even_port() -> int:
    """A free TCP port that adb will not take for an emulator's: even, and far from 5555-5585."""
    for _ in range(200):
        port = random.randrange(20000, 30000, 2)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port between 20000 and 30000")


class AdbServer:
    """`adb nodaemon server` as a child, so that it can be killed and what a client restarts can be ended too."""

    def __init__(self, folder: Path) -> None:
        assert ADB is not None
        self.port = free_even_port()
        self.home = folder / "adb-home"
        self.home.mkdir(parents=True)
        self.env = {
            **os.environ,
            "HOME": str(self.home),
            "ANDROID_ADB_SERVER_PORT": str(self.port),
            "ADB_MDNS": "0",
            "ANDROID_USER_HOME": str(self.home),
            "TMPDIR": str(self.home),
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.home / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [ADB, "-L", f"tcp:localhost:{self.port}", "nodaemon", "server"], env=self.env, stdout=log, stderr=log
            )
        wait_for(self.listening, "the adb server")

    def listening(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def adb(self, *arguments: str) -> str:
        """Run one adb command against this server."""
        done = subprocess.run([ADB, *arguments], env=self.env, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr

    def kill(self) -> None:
        """SIGKILL whatever serves on the port: our child, or one that a client started since."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        if self.listening():
            self.adb("kill-server")

    def destroy(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.kill()
