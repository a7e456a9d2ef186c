"""The views of a database kept the same as this program's.

In: a store or a connection. Out: views made, replaced, taken away. `ensure_views` does nothing where they are as they
should be, which `meta` says; migrations take them away first and put them back afterwards, so no view stands in the way of
a change to a table.
"""

from __future__ import annotations

import hashlib

from sqlalchemy import Connection, text

from bmoe_collector.store import schema
from bmoe_collector.store.engine import Store
from bmoe_collector.store.views import views

KEY = "views"
"""Row of `meta` that says which views the database has."""


def fingerprint() -> str:
    """Which views this program has: equal programs say the same."""
    told = "".join(f"{view.name}{sorted(view.sql.items())}" for view in views().values())
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def drop_views(connection: Connection) -> None:
    """Take every view of ours away, those of earlier programs too."""
    query = (
        "SELECT name FROM sqlite_master WHERE type = 'view'"
        if connection.dialect.name == "sqlite"
        else "SELECT table_name FROM information_schema.views WHERE table_schema = current_schema()"
    )
    for name in sorted(connection.execute(text(query)).scalars()):
        if str(name).startswith("v_"):
            connection.exec_driver_sql(f'DROP VIEW IF EXISTS "{name}"')


def create_views(connection: Connection) -> None:
    """Make the views, in place of what is there, and say so in `meta`."""
    drop_views(connection)
    for view in views().values():
        connection.exec_driver_sql(f'CREATE VIEW "{view.name}" AS {view.sql[connection.dialect.name]}')
    connection.execute(schema.META.delete().where(schema.META.c.key == KEY))
    connection.execute(schema.META.insert().values(key=KEY, value=fingerprint()))


def ensure_views(store: Store) -> None:
    """Make the views unless the database has exactly these."""
    held = schema.META.select().where(schema.META.c.key == KEY)
    with store.read() as connection:
        row = connection.execute(held).first()
    if row is not None and row.value == fingerprint():
        return
    with store.write() as connection:
        if connection.dialect.name == "postgresql":
            from bmoe_collector.store.migrate import LOCK

            connection.execute(text("SELECT pg_advisory_xact_lock(:n)"), {"n": LOCK})
            row = connection.execute(held).first()
            if row is not None and row.value == fingerprint():
                return
        create_views(connection)
