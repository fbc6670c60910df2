"""A source that reads the outbox."""

from pillarbox.inbox.sources.postgres.outbox_source import PostgresSource

__all__ = ["PostgresSource"]
