"""A source that reads NATS JetStream through durable pull consumers."""

from pillarbox.inbox.sources.nats.source import NatsSource

__all__ = ["NatsSource"]
