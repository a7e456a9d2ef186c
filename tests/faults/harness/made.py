"""What every play begins with and none changes, made once and copied: a new PostgreSQL cluster.

In: nothing. Out: the folder to copy from. It is made by whoever asks first; plays that are processes of one run share it
(`shared`), any other process makes its own and removes it at its end.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from support import postgres

VARIABLE = "BMOE_FAULTS_MADE"


@contextlib.contextmanager
def shared() -> Iterator[Path]:
    """A folder in which the processes that are started meanwhile share what they make."""
    folder = _folder()
    os.environ[VARIABLE] = str(folder)
    try:
        yield folder
    finally:
        del os.environ[VARIABLE]
        shutil.rmtree(folder, ignore_errors=True)


def copy_cluster(target: Path) -> None:
    """Make `target` the data directory of a server that was never started."""
    folder = Path(os.environ.get(VARIABLE) or _own())
    made, new = folder / "cluster", folder / "cluster.new"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(new, ignore_errors=True)  # of one that was ended while it made it
            postgres.initialise(new)
            new.rename(made)
    subprocess.run(["cp", "-a", str(made), str(target)], check=True, capture_output=True, timeout=60)


@functools.cache
def _own() -> Path:
    folder = _folder()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="bmoe-made-"))
    folder.chmod(0o755)  # the server's user has to get in
    return folder
