"""Termux's wake lock, held while a plan runs.

In: a file that says that we took it. Out: one sentence saying what was held or why not, for the record. A wake lock prevents
neither freezing nor killing (field notes, 2); it only keeps the CPU from sleeping.

The lock is Termux's and outlives a killed agent: the next one takes it again when there is something to run, and gives it
back when there is not.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

_TIMEOUT_S = 10


class WakeLock:
    """Held between `acquire` and `release`; both may be called again."""

    def __init__(
        self,
        taken: Path | None = None,
        command: str = "termux-wake-lock",
        release_command: str = "termux-wake-unlock",
    ) -> None:
        """`taken` is there while the lock is, also after a kill."""
        self._taken = taken
        self._command = command
        self._release_command = release_command
        self._left_behind = taken is not None and taken.exists()
        self.held = False
        self.detail = "not asked for"

    def acquire(self) -> str:
        """Take the lock where it exists; says what came of it."""
        if not self.held:
            self.detail = self._run(self._command)
            self.held = not self.detail
            self.detail = self.detail or "held"
            if self.held and self._taken is not None:
                with contextlib.suppress(OSError):
                    self._taken.touch(mode=0o600)
        return self.detail

    def release(self) -> None:
        """Give it back when it is held, or was left behind by an agent that was killed."""
        if self.held or self._left_behind:
            self.held = self._left_behind = False
            self.detail = self._run(self._release_command) or "released"
            if self._taken is not None:
                with contextlib.suppress(OSError):
                    self._taken.unlink(missing_ok=True)

    @staticmethod
    def _run(command: str) -> str:
        path = shutil.which(command)
        if path is None:
            return f"{command} does not exist here"
        try:
            done = subprocess.run(
                [path], stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{command} failed: {error}"
        if done.returncode:
            return f"{command} failed with {done.returncode}: {done.stderr[-200:].decode('utf-8', 'replace').strip()}"
        return ""
