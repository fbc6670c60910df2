"""Publishes to a webhook: one POST for each message, as a signed CloudEvent."""

from relay.publishers.http.publisher import HttpPublisher

__all__ = ["HttpPublisher"]
