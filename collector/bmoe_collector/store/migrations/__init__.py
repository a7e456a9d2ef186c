"""Alembic migrations, oldest first; each is frozen once released."""
