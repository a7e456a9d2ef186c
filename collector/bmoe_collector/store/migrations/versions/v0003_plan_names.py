"""An index for a plan asked for by its name, which every comparison of cells does."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the index."""
    op.create_index("ix_runs_plan_name_started_wall_ns", "runs", ["plan_name", "started_wall_ns"])
