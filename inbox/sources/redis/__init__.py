"""A source that reads Redis Streams: the consumer is the consumer group."""

from inbox.sources.redis.source import RedisSource

__all__ = ["RedisSource"]
