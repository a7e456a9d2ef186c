"""The database of a play: an SQLite file, or a PostgreSQL server of its own on a small disk of its own.

In: a folder. Out: `url` for the collector, `rows` for the truth, and what can go wrong with a server: killed, stopped,
restarted, told to take no writes, started on a disk that is mounted read-only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.harness import made
from support import postgres
from support.agents import wait_for

NAME = "faults"
OWN = "harness"


class SqliteDatabase:
    """A file."""

    dialect = "sqlite"

    def __init__(self, folder: Path) -> None:
        self.path = folder / "runs.db"
        self.url = str(self.path)

    def rows(self, query: str) -> list[dict[str, Any]]:
        """A query's rows."""
        with contextlib.closing(sqlite3.connect(self.path, timeout=60)) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(query)]

    def execute(self, statement: str, values: tuple[Any, ...] = ()) -> int:
        """Change something (tests of the harness); how many rows."""
        with contextlib.closing(sqlite3.connect(self.path, timeout=60)) as connection, connection:
            return connection.execute(statement, values).rowcount

    def connections(self) -> list[str]:
        """None: a file has no server."""
        return []

    def held(self, pid: int) -> tuple[int, int]:
        """Connections that a process has open, and the descriptors that they take."""
        places = []
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed since
                places.append(os.readlink(f"/proc/{pid}/fd/{entry}"))
        name = str(self.path)
        return places.count(name), sum(place.startswith(name) for place in places)

    def lock(self) -> Callable[[], None]:
        """Hold the only right to write; call what is returned to give it back."""
        connection = sqlite3.connect(self.path, timeout=60, isolation_level=None)
        connection.execute("begin immediate")
        return connection.close

    def heal(self) -> None:
        """Nothing was done to it."""

    def close(self) -> None:
        """Nothing runs."""


class PostgresDatabase:
    """A server in a folder of its own, which is a small memory disk where that can be had."""

    dialect = "postgresql"

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="bmoe-pg-")
        self.own_disk = _mount_memory(self.folder, 400)
        os.chmod(self.folder, 0o755)
        try:
            made.copy_cluster(Path(self.folder, "data"))
            self.server = postgres.Server.start(self.folder)
            self.server.execute("postgres", f"CREATE DATABASE {NAME}")
        except BaseException:
            self.close()
            raise
        self.url = self.server.url(NAME)
        self._own = f"host={self.folder} user=bmoe dbname={NAME} application_name={OWN}"

    def rows(self, query: str) -> list[dict[str, Any]]:
        """A query's rows."""
        import psycopg
        from psycopg.rows import dict_row

        with psycopg.connect(self._own, row_factory=dict_row) as connection:
            return connection.execute(query).fetchall()

    def execute(self, statement: str, values: tuple[Any, ...] = ()) -> int:
        """Change something (tests of the harness); how many rows."""
        import psycopg

        with psycopg.connect(self._own) as connection:
            return connection.execute(statement.replace("?", "%s"), values).rowcount

    def connections(self) -> list[str]:
        """The clients that the server has, our own not counted, and what each does."""
        found = self.rows(
            "select pid, state, query from pg_stat_activity where datname = current_database() "
            f"and backend_type = 'client backend' and application_name <> '{OWN}'"
        )
        return [f"{row['pid']} {row['state']}: {row['query'][:200]}" for row in found]

    def held(self, pid: int) -> tuple[int, int]:
        """Connections that a process has open, and the descriptors that they take: the collector is the only client."""
        clients = len(self.connections())
        return clients, clients

    def kill(self) -> None:
        """SIGKILL: the server's other processes notice and end."""
        self.server.process.kill()
        self.server.process.wait()

    def stop(self) -> None:
        """An orderly end that does not wait for clients."""
        self.server.stop()

    def signal_all(self, number: int) -> None:
        """A signal for the server and all its backends."""
        main = self.server.process.pid
        backends = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        for pid in [main, *map(int, backends)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def start(self) -> None:
        """Start until it answers; what is left of a killed one may take a moment to go."""
        wait_for(self._try_start, "PostgreSQL to start again", 60)

    def start_fails(self) -> None:
        """Try once, on a disk that takes nothing."""
        process = self._launch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3)
        if process.poll() is None:
            process.kill()
            process.wait()

    def refuse_writes(self, on: bool) -> None:
        """Every transaction is read-only from now on, for connections that are open too."""
        word = "on" if on else "off"
        self.server.execute("postgres", f"ALTER SYSTEM SET default_transaction_read_only = {word}")
        self.server.execute("postgres", "SELECT pg_reload_conf()")

    def disk_read_only(self, on: bool) -> None:
        """Mount the disk again, for reading alone or not."""
        if self.own_disk:
            word = "ro" if on else "rw"
            subprocess.run(["mount", "-o", f"remount,{word}", self.folder], check=True, capture_output=True, timeout=30)

    def fill_disk(self, on: bool) -> None:
        """Take all the room that its disk has, where the disk is its own; or give it back."""
        filler = Path(self.folder, "filler")
        if not on:
            filler.unlink(missing_ok=True)
            wait_for(self._answers, "PostgreSQL to answer again", 60)
        elif self.own_disk:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 20) if os.statvfs(self.folder).f_bavail > 512 else bytes(4096))

    def heal(self) -> None:
        """Whatever was done to it, let it answer."""
        if self.server.process.poll() is None:
            self.signal_all(signal.SIGCONT)
        else:
            with contextlib.suppress(subprocess.CalledProcessError):
                self.disk_read_only(False)
            self.start()

    def _answers(self) -> bool:
        """Whether it answers; started again when it went down, which it may do a moment after its disk has room again."""
        if self.server.process.poll() is not None:
            return self._try_start()
        with contextlib.suppress(Exception):
            self.server.execute("postgres", "SELECT 1")
            return True
        return False

    def close(self) -> None:
        """End it, and give the disk back."""
        server = getattr(self, "server", None)
        if server is not None:
            if server.process.poll() is None:
                self.signal_all(signal.SIGCONT)
            server.stop()
        if self.own_disk:
            subprocess.run(["umount", "-l", self.folder], check=False, capture_output=True, timeout=30)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _launch(self) -> subprocess.Popen[bytes]:
        settings = [part for setting in postgres.QUICK for part in ("-c", setting)]
        data = os.path.join(self.folder, "data")
        return subprocess.Popen(
            [f"{postgres.binaries()}/postgres", "-D", data, "-k", self.folder, "-c", "listen_addresses=", *settings],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8", "HOME": self.folder},
            cwd=self.folder,
            **postgres._unprivileged(),
        )

    def _try_start(self) -> bool:
        self.server.process = self._launch()
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline and self.server.process.poll() is None:
            with contextlib.suppress(Exception):
                self.server.execute("postgres", "SELECT 1")
                return True
            time.sleep(0.05)
        if self.server.process.poll() is None:
            self.server.process.kill()
        self.server.process.wait()
        time.sleep(0.2)
        return False


Database = SqliteDatabase | PostgresDatabase


def _mount_memory(folder: str, size_mib: int) -> bool:
    """A memory disk at a folder, where this user may mount one."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "bmoe-faults", folder]
    return subprocess.run(command, check=False, capture_output=True, timeout=30).returncode == 0


def mount_memory(folder: Path, size_mib: int) -> bool:
    """The same for a phone's home, with what is in it."""
    aside = folder.with_name(folder.name + ".aside")
    os.rename(folder, aside)
    folder.mkdir(mode=0o700)
    done = _mount_memory(str(folder), size_mib)
    for entry in aside.iterdir():
        shutil.move(entry, folder / entry.name)
    aside.rmdir()
    return done
