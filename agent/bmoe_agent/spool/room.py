"""Room for the record: the disk's own calls in one place, the reserve, the quota.

In: a directory and bounds. Out: whether low-value frames must be given up now, and space when an end must be written.

Nothing unacknowledged is ever deleted (law 2). When the quota is reached or the disk runs short, samples and residency
are given up, and the record says so in a `Gap`; the engine's output follows only when the disk is truly full. The
reserve is a file of real bytes that is removed at the very end of room, so that gaps and `RunEnded` can be written.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field

from bmoe_agent.spool.layout import RESERVE

RESERVE_BYTES = 256 << 10
LOW_WATER_BYTES = 24 << 20
FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})


class Disk:
    """The calls a full disk makes fail; tests ship another one."""

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        """As os.write."""
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        """As os.fsync."""
        os.fsync(descriptor)

    def free_bytes(self, path: str) -> int:
        """What this user may still write."""
        facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize


@dataclass(slots=True)
class Room:
    """How much the spool may take and what the disk still has."""

    root: str
    quota_bytes: int
    low_water_bytes: int = LOW_WATER_BYTES
    disk: Disk = field(default_factory=Disk)

    def free_bytes(self) -> int:
        """Free on the spool's disk."""
        return self.disk.free_bytes(self.root)

    def short(self, used_bytes: int) -> str:
        """Why samples must be given up now; empty while there is room."""
        if used_bytes >= self.quota_bytes:
            return f"the spool's quota of {self.quota_bytes} bytes is reached"
        free = self.free_bytes()
        if free < self.low_water_bytes:
            return f"{free} bytes free on the disk, fewer than {self.low_water_bytes}"
        return ""

    def keep_reserve(self) -> bool:
        """Make the reserve if it is missing and there is plenty; returns whether it is there."""
        path = os.path.join(self.root, RESERVE)
        try:
            if os.stat(path).st_size >= RESERVE_BYTES:
                return True
        except FileNotFoundError:
            pass
        if self.free_bytes() < 4 * RESERVE_BYTES:
            return False
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                # Random bytes: a file system that compresses or leaves holes would reserve nothing for zeros.
                self.disk.write(descriptor, os.urandom(RESERVE_BYTES))
            finally:
                os.close(descriptor)
        except OSError:
            return False
        return True

    def give_reserve(self) -> bool:
        """Remove the reserve; returns whether there was one."""
        try:
            os.unlink(os.path.join(self.root, RESERVE))
        except FileNotFoundError:
            return False
        return True
