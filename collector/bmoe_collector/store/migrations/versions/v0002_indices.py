"""Indices for the questions that are asked most: files still to be fetched, the newest runs."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the indices."""
    op.create_index("ix_artifacts_state", "artifacts", ["state"])
    op.create_index("ix_runs_stored_wall_ns", "runs", ["stored_wall_ns"])
