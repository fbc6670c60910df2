"""Publishes to NATS JetStream: the subject is the topic, a stream keeps it."""

from relay.publishers.nats.publisher import NatsPublisher

__all__ = ["NatsPublisher"]
