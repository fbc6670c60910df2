"""Publishes to a web hook: one POST for each message, as a signed CloudEvent."""

from relay.publishers.http.publisher import HttpPublisher

__all__ = ["HttpPublisher"]
