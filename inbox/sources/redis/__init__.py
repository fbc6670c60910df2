"""A source that reads Redis Streams: a topic is a stream, a consumer is a group."""

from pillarbox.inbox.sources.redis.source import RedisSource

__all__ = ["RedisSource"]
