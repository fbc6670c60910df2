"""Deliveries out of NATS JetStream, by durable pull consumers."""

from inbox.sources.nats.source import NatsSource

__all__ = ["NatsSource"]
