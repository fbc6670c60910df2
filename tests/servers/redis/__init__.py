"""A private Redis server for tests."""

from tests.servers.redis.server import RedisServer, redis_server

__all__ = ["RedisServer", "redis_server"]
