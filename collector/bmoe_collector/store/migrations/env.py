"""What Alembic runs: the migrations over the connection `migrate.upgrade` opened, inside its transaction."""

from __future__ import annotations

from alembic import context

from bmoe_collector.store import schema

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=schema.METADATA,
    transactional_ddl=True,
    render_as_batch=True,
)
context.run_migrations()
