"""Read-only SQL: one SELECT in, columns and rows of plain values out. Nothing it can say changes anything.

SQLite: the file is opened read-only, `query_only`, under an authorizer that allows reading and nothing else. Postgres: a
READ ONLY transaction, the text run as the query of a cursor, which takes one SELECT (or VALUES) and no other statement.
Numbers come back alike: Postgres' NUMERIC is an int where it is whole and a float elsewhere; times are ISO text.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from bmoe_collector.common import OutsideError, UserError
from bmoe_collector.store.engine import Store, connect_reading
from bmoe_collector.store.standing_views import ensure_views

_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE, sqlite3.SQLITE_FUNCTION}
_FORBIDDEN_FUNCTIONS = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}


@dataclass(frozen=True, slots=True)
class Result:
    """What a query answered; `more` when the limit cut it."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    more: bool = False


def run_sql(store: Store, query: str, limit: int = 0) -> Result:
    """Run one SELECT; at most `limit` rows (0: all).

    Raises:
        UserError: it is no SELECT, or the database cannot read it; the message is the database's own.
        OutsideError: the database failed.
    """
    text = query.strip().rstrip(";").strip()
    if not text:
        raise UserError("the query is empty; for example: SELECT model_name, avg(tok_s) FROM v_runs GROUP BY 1")
    ensure_views(store)
    answer = _sqlite(store, text) if store.dialect == "sqlite" else _postgresql(store, text, limit)
    columns = next(answer)
    rows: list[tuple[Any, ...]] = []
    for row in answer:
        if limit and len(rows) == limit:
            answer.close()
            return Result(columns, rows, more=True)
        rows.append(tuple(_plain(value) for value in row))
    return Result(columns, rows)


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() and abs(value) < 2**63 else float(value)
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, bool):
        return int(value)
    return value


def _allow(action: int, first: str | None, second: str | None, *_: object) -> int:
    if action not in _ALLOWED:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and (second or first or "").lower() in _FORBIDDEN_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def _sqlite(store: Store, query: str) -> Generator[Any]:
    path = store.engine.url.database
    if not path or path == ":memory:":
        raise UserError("a database in memory cannot be opened a second time; use a file")
    try:
        with closing(connect_reading(Path(path))) as connection:
            connection.execute("PRAGMA query_only=ON")
            connection.set_authorizer(_allow)
            # Lets Ctrl-C through while a query computes.
            connection.set_progress_handler(lambda: 0, 200_000)
            cursor = connection.execute(query)
            if cursor.description is None:
                raise UserError("only a SELECT is answered")
            yield tuple(each[0] for each in cursor.description)
            yield from cursor
    except sqlite3.Warning as error:  # more than one statement
        raise UserError(f"{error}: one SELECT is answered") from error
    except sqlite3.DatabaseError as error:
        message = str(error)
        if "not authorized" in message or "prohibited" in message or "readonly" in message:
            raise UserError(f"{message}: only reading is allowed") from error
        if "interrupted" in message:
            raise KeyboardInterrupt from error
        if isinstance(error, sqlite3.OperationalError | sqlite3.ProgrammingError) and "locked" not in message:
            raise UserError(f"{message}; `bmoe sql --views` lists views and columns") from error
        raise OutsideError(f"{path}: {message}") from error


def _postgresql(store: Store, query: str, limit: int) -> Generator[Any]:
    import psycopg

    engine = store.engine.execution_options(postgresql_readonly=True)
    with engine.connect() as connection, connection.begin():
        driver: Any = connection.connection.driver_connection
        try:
            with driver.cursor(name="bmoe_sql") as cursor:
                cursor.itersize = min(limit + 1, 5000) if limit else 5000
                cursor.execute(query)
                yield tuple(each.name for each in cursor.description)
                yield from cursor
        except psycopg.OperationalError as error:
            raise OutsideError(f"{_first(error)}") from error
        except psycopg.Error as error:
            raise UserError(f"{_first(error)}; `bmoe sql --views` lists views and columns") from error


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
