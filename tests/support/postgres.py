"""A real PostgreSQL server that the tests start themselves, on a unix socket in a folder of its own.

`Server.start(folder)` runs initdb and postgres as the user postgres (or nobody) when the tests are root, because the
server refuses root. No TCP port is opened, no system cluster is touched. Fixtures are at the end: import them in
conftest, or request them by name where conftest does.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

QUICK = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "shared_buffers=32MB", "max_connections=40")


def binaries() -> str | None:
    """The newest folder with initdb and postgres, None when there is none."""
    found = glob.glob("/usr/lib/postgresql/*/bin/initdb")
    found.sort(key=lambda path: [int(part) for part in re.findall(r"\d+", path)])
    if found:
        return os.path.dirname(found[-1])
    path = shutil.which("initdb")
    return os.path.dirname(os.path.realpath(path)) if path else None


def _unprivileged() -> dict[str, int]:
    """Arguments for subprocess that drop root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return {"user": entry.pw_uid, "group": entry.pw_gid}
    raise RuntimeError("tests run as root and there is no user postgres or nobody to run PostgreSQL as")


def initialise(data: str | os.PathLike[str]) -> None:
    """Make the data directory of a server; raises RuntimeError with what initdb says."""
    found = binaries()
    assert found is not None
    as_user = _unprivileged()
    os.makedirs(data, exist_ok=True)
    if as_user:
        os.chown(data, as_user["user"], as_user["group"])
    folder = os.path.dirname(data)
    made = subprocess.run(
        [
            f"{found}/initdb",
            "-D",
            data,
            "-U",
            "bmoe",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-sync",
            "--no-instructions",
        ],
        capture_output=True,
        env=_environment(folder),
        cwd=folder,
        check=False,
        **as_user,
    )
    if made.returncode:
        raise RuntimeError(f"initdb failed: {made.stderr.decode(errors='replace')}")


def _environment(folder: str) -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8", "HOME": folder}


@dataclass
class Server:
    """A running server; `url(database)` is an SQLAlchemy URL."""

    folder: str
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, folder: str, *, durable: bool = False) -> Server:
        """Start on `folder`/data, which is initialised unless it was; raises RuntimeError with the server's own log."""
        found = binaries()
        assert found is not None
        as_user = _unprivileged()
        data = os.path.join(folder, "data")
        if as_user:
            os.chown(folder, as_user["user"], as_user["group"])
        if not os.path.exists(os.path.join(data, "PG_VERSION")):
            initialise(data)
        settings = [] if durable else [part for setting in QUICK for part in ("-c", setting)]
        log_path = os.path.join(folder, "log")
        with open(log_path, "wb") as log:
            process = subprocess.Popen(
                [f"{found}/postgres", "-D", data, "-k", folder, "-c", "listen_addresses=", *settings],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(folder),
                cwd=folder,
                **as_user,
            )
        server = cls(folder, process)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if process.poll() is not None:
                break
            with contextlib.suppress(Exception):
                server.execute("postgres", "SELECT 1")
                return server
            time.sleep(0.05)
        server.stop()
        with open(log_path, errors="replace") as log_text:
            raise RuntimeError(f"PostgreSQL did not start: {log_text.read()[-2000:]}")

    def url(self, database: str) -> str:
        """An SQLAlchemy URL over the unix socket."""
        return f"postgresql://bmoe@/{database}?host={self.folder}"

    def execute(self, database: str, statement: str) -> None:
        """Run one statement outside a transaction."""
        import psycopg

        with psycopg.connect(f"host={self.folder} user=bmoe dbname={database}", autocommit=True) as connection:
            connection.execute(statement)

    def new_database(self, template: str = "template1") -> str:
        """Create a database with a random name; returns its name."""
        name = f"t{secrets.token_hex(6)}"
        self.execute("postgres", f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return name

    def stop(self) -> None:
        """Stop it at once and wait until it is gone."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)  # fast shutdown
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGQUIT)
                self.process.wait(20)


@contextlib.contextmanager
def running(*, durable: bool = False) -> Iterator[Server]:
    """A server for as long as the block lasts. Its folder is short, for the limit on socket paths, and readable."""
    folder = tempfile.mkdtemp(prefix="bmoe-pg-")
    os.chmod(folder, 0o755)
    server = None
    try:
        server = Server.start(folder, durable=durable)
        yield server
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """One server for the tests of this process; skips with the reason where there is none."""
    if binaries() is None:
        pytest.skip("no PostgreSQL server here: apt-get install postgresql")
    with running() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_template(postgres_server: Server) -> str:
    """A database with the newest tables, to copy from."""
    from bmoe_collector.store.engine import open_store

    name = postgres_server.new_database()
    open_store(postgres_server.url(name)).close()
    return name


@pytest.fixture
def postgres_empty_url(postgres_server: Server) -> str:
    """URL of a new database without tables."""
    return postgres_server.url(postgres_server.new_database())


@pytest.fixture
def postgres_url(postgres_server: Server, postgres_template: str) -> str:
    """URL of a new database with the newest tables."""
    name = f"t{secrets.token_hex(6)}"
    postgres_server.execute("postgres", f'CREATE DATABASE "{name}" TEMPLATE "{postgres_template}"')
    # A copy must not share its identity with the template.
    postgres_server.execute(name, f"UPDATE meta SET value = '{secrets.token_hex(16)}' WHERE key = 'store_id'")
    return postgres_server.url(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path) -> str:
    """URL of a new store, on each of the two databases."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/runs.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path) -> str:
    """URL of a database without tables, on each of the two."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/empty.db"
    return str(request.getfixturevalue("postgres_empty_url"))
