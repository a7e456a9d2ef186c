"""Our own forwards, and nobody else's.

In: a transport and an agent's abstract socket. Out: the path of a unix socket on this host that leads there. The
sockets lie in a folder of mode 0700 (who may reach a phone is who may enter it), one sub-folder for each process with
a lock file held as long as the process lives:

    <runtime dir>/bmoe-fleet/<adb server's port>-<random>/lock
    <runtime dir>/bmoe-fleet/<adb server's port>-<random>/<transport id>-<tail of the name>.sock

so a later process can tell which forwards a killed one left behind, and removes those alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from bmoe_collector.common import OutsideError
from bmoe_collector.reach.adb import Adb, AdbError, Transport

SUN_PATH_MAX = 107


class Forwards:
    """The forwards of this process; safe from several threads."""

    def __init__(self, adb: Adb, base: Path | None = None) -> None:
        """Make the folder, and remove what killed processes left."""
        self._adb = adb
        self._lock = threading.Lock()
        self._mine: dict[str, tuple[int, str]] = {}  # local end: (transport id, remote end)
        base = self._base = base or _runtime_folder()
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = base.lstat()  # a link that another user laid here is not followed
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise OutsideError(f"{base}: belongs to another user or is open to others; remove it or chmod 700 it")
            with _locked(base / "lock"):  # nobody sweeps a folder whose lock is not held yet
                self._sweep(base)
                self.folder = base / f"{adb.port}-{secrets.token_hex(3)}"
                self.folder.mkdir(mode=0o700)
                self._held = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutsideError(f"{base}: {error.strerror}; XDG_RUNTIME_DIR names another place") from None

    def path_to(self, transport: Transport, socket: str) -> Path:
        """A socket that leads to the agent, made or made again if it is not there. Raises `AdbError`."""
        tail = hashlib.sha256(socket.encode()).hexdigest()[:12]
        path = self.folder / f"{transport.transport_id}-{tail}.sock"
        if len(os.fsencode(path)) > SUN_PATH_MAX:
            raise OutsideError(f"{path}: too long for a unix socket; set XDG_RUNTIME_DIR to a shorter folder")
        local, remote = f"localfilesystem:{path}", f"localabstract:{socket}"
        with self._lock:
            there = any(item.local == local and item.remote == remote for item in self._adb.forwards())
            if not there:
                # a path left by a forward that died with its transport refuses; adb makes it anew
                self._adb.forward(transport.transport_id, local, remote)
            self._mine[local] = (transport.transport_id, remote)
        return path

    def drop(self, path: Path) -> None:
        """Remove one of ours."""
        local = f"localfilesystem:{path}"
        with self._lock:
            if self._mine.pop(local, None) is not None:
                self._adb.remove_forward(local)
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()

    def close(self) -> None:
        """Remove all of ours, the folder, and what processes that were killed meanwhile left."""
        with self._lock:
            for local in list(self._mine):
                self._adb.remove_forward(local)
            self._mine.clear()
            shutil.rmtree(self.folder, ignore_errors=True)
            if self._held >= 0:
                os.close(self._held)
                self._held = -1
                with contextlib.suppress(OSError), _locked(self._base / "lock"):
                    self._sweep(self._base)

    def _sweep(self, base: Path) -> None:
        """Remove folders of this adb server's whose process is gone, with their forwards."""
        for folder in base.glob(f"{self._adb.port}-*"):
            try:
                held = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                shutil.rmtree(folder, ignore_errors=True)
                continue
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(AdbError):
                    for item in self._adb.forwards():
                        if item.local.startswith(f"localfilesystem:{folder}/"):
                            self._adb.remove_forward(item.local)
                shutil.rmtree(folder, ignore_errors=True)
            except BlockingIOError:
                pass  # its process lives
            finally:
                os.close(held)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _runtime_folder() -> Path:
    """A folder of this user alone with a short path."""
    named = os.environ.get("XDG_RUNTIME_DIR")
    if named and len(named) < 60 and os.access(named, os.W_OK):
        return Path(named) / "bmoe-fleet"
    return Path(tempfile.gettempdir() if len(tempfile.gettempdir()) < 60 else "/tmp") / f"bmoe-fleet-{os.getuid()}"  # noqa: S108 - owner and mode are checked
