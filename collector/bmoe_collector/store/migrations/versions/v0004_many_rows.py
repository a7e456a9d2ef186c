"""Tables of many rows are not checked row by row any more where a server would look the run up for each (`schema_rows.UNCHECKED`)."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Drop the foreign keys; SQLite, whose check is a look into its own cache, keeps them."""
    if op.get_bind().dialect.name == "postgresql":
        for table in ("tokens_csv", "tokens_stdout", "samples"):
            op.drop_constraint(f"fk_{table}_run_no", table, type_="foreignkey")
