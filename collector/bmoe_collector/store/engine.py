"""The way into a database: `open_store(url) -> Store`.

In: an SQLAlchemy URL (`sqlite:///path`, `postgresql+psycopg://...`) or a plain path. Out: a `Store` with transactions.

An empty database is given its tables at once; one that is older or newer than this program is refused with the
command that helps, because changing a shared database is a person's decision. SQLite runs in WAL with
`synchronous=FULL`, PostgreSQL never with `synchronous_commit=off`: what is acknowledged to a phone must survive a power cut
here (law 2).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, Table, create_engine, event, inspect, make_url, select, text
from sqlalchemy.exc import DBAPIError

from bmoe_collector.store import schema
from bmoe_collector.store.turns import Turn

HEAD = "0004"
"""The newest migration; a test compares it with the folder's."""


WRITERS = 8
"""Transactions on a server that a process writes in at once: fewer than the pool has connections, which reads need too."""


class StoreError(Exception):
    """The database cannot be used; the message says which and what to do."""


class StoreTooOldError(StoreError):
    """Its tables are of an earlier version: `bmoe db upgrade`."""


class StoreTooNewError(StoreError):
    """Its tables are of a later version than this program."""


def to_json(value: Any) -> str:
    """Strict JSON as the JSON columns hold it: non-finite numbers are null, bytes become text."""
    try:
        return _encode(value)
    except (ValueError, TypeError):
        return _encode(plain(value))


_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def plain(value: Any) -> Any:
    """The value with everything JSON cannot say replaced."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (str, int, bool)):
        return value
    return str(value)


def view(data: bytes | str) -> str:
    """Text that both databases can hold: invalid UTF-8 as U+FFFD, NUL shown as U+2400, no lone surrogates."""
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    return data.decode("utf-8", "replace").replace("\x00", "␀")


def wall_ns() -> int:
    """Now, as stored in columns named wall."""
    return time.time_ns()


@dataclass(frozen=True, slots=True)
class Store:
    """An open database of the right version."""

    engine: Engine
    url: str
    store_id: str
    turn: Turn = field(default_factory=Turn, repr=False, compare=False)

    @property
    def dialect(self) -> str:
        """Name of the database: sqlite or postgresql."""
        return self.engine.dialect.name

    @contextlib.contextmanager
    def write(self, idle_s: float | None = None, *, urgent: bool = False) -> Iterator[Connection]:
        """A transaction that means to write: on SQLite it takes the write lock at its start and waits for it.

        This process' threads wait in the order of asking, `urgent` ones before the others; none may begin another inside.

        A server ends it when this process says nothing in it for `idle_s` (stopped, asleep): it has locked what others want.
        """
        with (
            self.turn.taken(urgent=urgent),
            self.engine.connect().execution_options(bmoe_write=True) as connection,
            connection.begin(),
        ):
            if idle_s is not None and self.dialect == "postgresql":
                connection.execute(text(f"SET LOCAL idle_in_transaction_session_timeout = {int(idle_s * 1000)}"))
            yield connection

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that reads: everything in it is of one moment."""
        with self.engine.connect() as connection, connection.begin():
            yield connection

    def close(self) -> None:
        """Give the connections back."""
        self.engine.dispose()


def insert_new(connection: Connection, table: Table, values: dict[str, Any]) -> None:
    """Insert a row unless one with its key is there: two hosts may meet the same plan or phone at once."""
    connection.execute(_insert_new(connection.dialect.name, table), values)


@lru_cache(maxsize=64)
def _insert_new(dialect: str, table: Table) -> Any:
    # Each dialect is slow to import, and a process needs one.
    if dialect == "sqlite":
        from sqlalchemy.dialects import sqlite

        return sqlite.insert(table).on_conflict_do_nothing()
    from sqlalchemy.dialects import postgresql

    return postgresql.insert(table).on_conflict_do_nothing()


def normal_url(url: str) -> str:
    """Accept a path, `sqlite:...`, `postgres://...` and `postgresql://...`; Postgres goes through psycopg 3."""
    if "://" not in url and not url.startswith("sqlite:"):
        return f"sqlite:///{os.path.abspath(os.path.expanduser(url))}"
    for prefix in ("postgres://", "postgresql://"):
        if url.startswith(prefix):
            return "postgresql+psycopg://" + url.removeprefix(prefix)
    return url


def sqlite_file(url: str) -> Path | None:
    """The file of an SQLite database's URL; None for one in memory and for a server's."""
    address = make_url(normal_url(url))
    if address.get_backend_name() != "sqlite" or address.database in (None, "", ":memory:"):
        return None
    return Path(str(address.database)).absolute()


def make_engine(url: str) -> Engine:
    """An engine for one of the two databases, with the settings the store relies on."""
    address = make_url(normal_url(url))
    kind = address.get_backend_name()
    if kind == "sqlite":
        file = sqlite_file(url)
        if file is not None and _only_readable(file):
            engine = create_engine(address, creator=lambda: connect_reading(file))
        else:
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
            engine = create_engine(address, connect_args={"timeout": 60.0})
            event.listen(
                engine, "connect", lambda connection, _record: _sqlite_connect(connection, str(file or address))
            )
        event.listen(engine, "begin", _sqlite_begin)
        return engine
    if kind != "postgresql":
        raise StoreError(f"{address.render_as_string()}: only sqlite and postgresql databases are supported")
    engine = create_engine(
        address,
        pool_pre_ping=True,
        connect_args={name: value for name, value in _PATIENCE.items() if name not in address.query},
    )
    event.listen(engine, "connect", _postgres_connect)
    return engine


_PATIENCE = {
    "connect_timeout": 20,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""How long a server that says nothing is believed in: a minute, not the system's two hours. An URL may say otherwise."""


def _postgres_connect(connection: Any, _record: object) -> None:
    # The other way round: a host that lost its power must not keep others from what its transaction had locked.
    with connection.cursor() as cursor:
        cursor.execute("SET tcp_keepalives_idle = 30")
        cursor.execute("SET tcp_keepalives_interval = 10")
        cursor.execute("SET tcp_keepalives_count = 3")
        # What is acknowledged to a phone is deleted there: a server that answers before it has written is told not to.
        cursor.execute(
            "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
        )
    connection.commit()


def _only_readable(file: Path) -> bool:
    """Somebody else's database, that this user may read and not write."""
    return file.is_file() and os.access(file, os.R_OK) and not os.access(file, os.W_OK)


def connect_reading(file: Path) -> sqlite3.Connection:
    """A connection that writes nothing, not even beside the file.

    In WAL mode SQLite wants its two side files to read, and makes them. Somebody who may not, reads the file as it is:
    where no side file lies there, nobody writes and the file alone is the whole database, which `immutable` says.
    """
    alone = "&immutable=1" if _only_readable(file) and not file.with_name(f"{file.name}-wal").exists() else ""
    # The pool hands it from thread to thread, to one at a time.
    connection = sqlite3.connect(
        f"file:{quote(str(file))}?mode=ro{alone}", uri=True, timeout=60.0, check_same_thread=False
    )
    connection.isolation_level = None
    return connection


def _sqlite_connect(connection: sqlite3.Connection, file: str) -> None:
    # pysqlite's own transaction handling commits before DDL and hides BEGIN; ours is explicit.
    connection.isolation_level = None
    cursor = connection.cursor()
    names = [str(row[0]) for row in cursor.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    if names and "alembic_version" not in names:
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        raise StoreError(
            f"{file}: this SQLite database is of something else (it holds {shown}) and was left as it is; name another one"
        )
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute("PRAGMA cache_size=-65536")
    cursor.execute("PRAGMA busy_timeout=60000")
    cursor.close()


def _sqlite_begin(connection: Connection) -> None:
    write = connection.get_execution_options().get("bmoe_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def version_of(engine: Engine) -> str | None:
    """The migration the database stands at; None for an empty one."""
    with engine.connect() as connection:
        names = inspect(connection).get_table_names()
        if "alembic_version" not in names:
            if names and "runs" in names:  # a server's database may hold other people's tables too
                raise StoreError(f"{engine.url!r} has tables but no version: it is not one of ours")
            return None
        row = connection.execute(text("SELECT version_num FROM alembic_version")).first()
        return str(row[0]) if row else None


def open_store(url: str, *, upgrade_empty: bool = True) -> Store:
    """Open a database of this version; raise StoreTooOldError, StoreTooNewError or StoreError (which one, what to do)."""
    engine = make_engine(url)
    shown = engine.url.render_as_string()
    try:
        found = version_of(engine)
        if found is None and upgrade_empty:
            from bmoe_collector.store.migrate import upgrade  # alembic is slow to import and seldom needed

            upgrade(engine)
            found = version_of(engine)
    except DBAPIError as error:
        engine.dispose()
        raise StoreError(f"cannot open the database {shown}: {first_line(error)}") from error
    except BaseException:
        engine.dispose()
        raise
    if found != HEAD:
        engine.dispose()
        if found is None:
            raise StoreTooOldError(f"{shown} is empty: run `bmoe db upgrade --db {shown}`")
        if found < HEAD:
            raise StoreTooOldError(
                f"{shown} is at version {found}, this program needs {HEAD}: run `bmoe db upgrade --db {shown}`"
            )
        raise StoreTooNewError(f"{shown} is at version {found}, this program knows {HEAD}: install a newer bmoe-fleet")
    places = 1 if engine.dialect.name == "sqlite" else WRITERS
    return Store(engine, normal_url(url), _store_id(engine), Turn(places))


def first_line(error: Exception) -> str:
    """What a database said, without the statement it was about."""
    said = str(getattr(error, "orig", None) or error).strip()
    return said.splitlines()[0] if said else type(error).__name__


def _store_id(engine: Engine) -> str:
    meta = schema.META
    with engine.connect() as connection:
        found = connection.execute(select(meta.c.value).where(meta.c.key == "store_id")).scalar()
    if found is None:
        raise StoreError(f"{engine.url!r} has no store id: run `bmoe db check`")
    return str(found)


def new_store_id() -> str:
    """32 random hex digits."""
    return secrets.token_hex(16)
