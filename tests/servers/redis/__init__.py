"""A private Redis server for tests."""

from tests.servers.redis.server import RedisServer, redis_program, redis_server

__all__ = ["RedisServer", "redis_program", "redis_server"]
