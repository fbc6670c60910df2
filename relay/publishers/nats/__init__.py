"""A publisher for NATS JetStream: a topic maps to a subject that a stream captures."""

from pillarbox.relay.publishers.nats.publisher import NatsPublisher

__all__ = ["NatsPublisher"]
