"""Many rows into one table by the driver's fastest way: `executemany` on tuples for SQLite, binary `COPY` for PostgreSQL.

In: an open transaction and rows of plain values, JSON columns already as text. Out: rows in the table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Table, types


def bulk(connection: Connection, table: Table, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Append rows."""
    if connection.dialect.name == "sqlite":
        driver = connection.connection.driver_connection
        assert driver is not None
        marks = ", ".join("?" * len(columns))
        driver.executemany(f'INSERT INTO "{table.name}" ({_quoted(columns)}) VALUES ({marks})', rows)  # noqa: S608 - our names
        return
    with Copy(connection, table, columns) as copy:
        copy.send(rows)


class Copy(contextlib.AbstractContextManager["Copy"]):
    """Rows for a PostgreSQL server, sent on as they come: it writes some while the next are made.

    Nothing else can be asked of the connection between the first row sent and the end.
    """

    def __init__(self, connection: Connection, table: Table, columns: Sequence[str]) -> None:
        self._connection = connection
        self._table = table
        self._columns = columns
        self._open = contextlib.ExitStack()
        self._copy: Any = None

    @property
    def begun(self) -> bool:
        """Whether rows were sent."""
        return self._copy is not None

    def send(self, rows: Iterable[Sequence[Any]]) -> None:
        """Append rows."""
        if self._copy is None:
            driver = self._connection.connection.driver_connection
            assert driver is not None
            cursor = self._open.enter_context(driver.cursor())
            # Binary: the driver neither prints numbers nor the server reads them; JSON goes as its text, which is its binary form.
            statement = f'COPY "{self._table.name}" ({_quoted(self._columns)}) FROM STDIN (FORMAT BINARY)'
            self._copy = self._open.enter_context(cursor.copy(statement))
            self._copy.set_types([_wire_type(self._table.c[name].type) for name in self._columns])
        write = self._copy.write_row
        for row in rows:
            write(row)

    def __exit__(self, *raised: Any) -> None:
        self._open.__exit__(*raised)


def _quoted(columns: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in columns)


def _wire_type(kind: Any) -> str:
    """The server's name for a column's type, as values of it are sent."""
    for known, name in _WIRE:
        if isinstance(kind, known):
            return name
    raise TypeError(f"no bulk write for columns of {kind!r}")


_WIRE: tuple[tuple[type, str], ...] = (
    (types.JSON, "text"),
    (types.String, "text"),
    (types.BigInteger, "int8"),
    (types.Integer, "int4"),
    (types.Float, "float8"),
    (types.Boolean, "bool"),
    (types.LargeBinary, "bytea"),
)
