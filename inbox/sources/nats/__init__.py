"""A source that reads NATS JetStream with durable pull consumers."""

from inbox.sources.nats.source import NatsSource

__all__ = ["NatsSource"]
