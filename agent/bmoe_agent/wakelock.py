"""Termux's wake lock, held while a plan runs.

In: nothing. Out: one sentence saying what was held or why not, for the record. A wake lock prevents neither freezing
nor killing (field notes, 2); it only keeps the CPU from sleeping.
"""

from __future__ import annotations

import shutil
import subprocess

_TIMEOUT_S = 10


class WakeLock:
    """Held between `acquire` and `release`; both may be called again."""

    def __init__(self, command: str = "termux-wake-lock", release_command: str = "termux-wake-unlock") -> None:
        self._command = command
        self._release_command = release_command
        self.held = False
        self.detail = "not asked for"

    def acquire(self) -> str:
        """Take the lock where it exists; says what came of it."""
        if not self.held:
            self.detail = self._run(self._command)
            self.held = not self.detail
            self.detail = self.detail or "held"
        return self.detail

    def release(self) -> None:
        """Give it back when it is held."""
        if self.held:
            self.held = False
            self.detail = self._run(self._release_command) or "released"

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
