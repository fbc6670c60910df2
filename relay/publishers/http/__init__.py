"""A publisher that posts each message to a webhook, as a signed CloudEvent."""

from pillarbox.relay.publishers.http.publisher import HttpPublisher

__all__ = ["HttpPublisher"]
