"""Deliveries out of Redis Streams: the stream is the topic, the group the consumer."""

from inbox.sources.redis.source import RedisSource

__all__ = ["RedisSource"]
