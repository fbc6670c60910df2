"""Alembic migrations; `outbox.migrate` runs them."""
