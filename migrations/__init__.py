"""Alembic migrations; `pillarbox.outbox.administration.migrate` runs them."""
