"""Alembic migrations; `outbox.administration.migrate` runs them."""
