"""A source that reads the outbox; and one that reads the copy in `inbox.message`."""

from inbox.sources.postgres.inbox_source import InboxSource
from inbox.sources.postgres.outbox_source import PostgresSource

__all__ = ["InboxSource", "PostgresSource"]
