"""A private Redis server for tests."""

from outbox.testing.redis.server import RedisServer, redis_server

__all__ = ["RedisServer", "redis_server"]
