"""Bringing a database to this program's version, with Alembic.

In: an engine. Out: the tables of the newest migration, data kept. Each migration runs in its own transaction, under a
lock, so that two hosts that start at once do not both migrate. Also runnable as `bmoe db upgrade`.
"""

from __future__ import annotations

import os
from typing import Any

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text

from bmoe_collector.store import schema, standing_views

LOCK = 0x626D6F65  # any number all hosts agree on


def config(connection: Connection | None = None) -> Config:
    """Alembic's configuration without an ini file."""
    made = Config()
    made.set_main_option("script_location", os.path.join(os.path.dirname(__file__), "migrations"))
    made.set_main_option("path_separator", "os")
    made.attributes["connection"] = connection
    return made


def upgrade(engine: Engine, to: str = "head") -> tuple[str | None, str | None]:
    """Migrate; returns the versions before and after. One transaction: all of it happens or nothing does."""
    with engine.connect().execution_options(bmoe_write=True) as connection, connection.begin():
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:n)"), {"n": LOCK})
        before = MigrationContext.configure(connection).get_current_revision()
        standing_views.drop_views(connection)  # a view stands in the way of changes to its tables
        command.upgrade(config(connection), to)
        after = MigrationContext.configure(connection).get_current_revision()
        if after == head():
            standing_views.create_views(connection)
    return before, after


def head() -> str:
    """The newest migration in the folder."""
    found = ScriptDirectory.from_config(config()).get_current_head()
    assert found is not None
    return found


def differences(engine: Engine) -> list[str]:
    """What the database has that the schema has not, or the other way round; empty when they agree."""
    with engine.connect() as connection:
        opts = {"compare_type": False, "include_object": _compared}
        context = MigrationContext.configure(connection, opts=opts)
        found = compare_metadata(context, schema.METADATA)
    return [str(item) for item in found]


def _compared(item: Any, _name: str | None, kind: str, _reflected: bool, _other: Any) -> bool:
    """Foreign keys that one of the two databases has not are no difference."""
    return kind != "foreign_key_constraint" or item.table.name not in {table.name for table in schema.UNCHECKED}
