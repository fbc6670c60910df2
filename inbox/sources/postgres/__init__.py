"""A source that reads `inbox.message`: PostgreSQL as the broker."""

from inbox.sources.postgres.source import PostgresSource

__all__ = ["PostgresSource"]
