"""Private Redis servers for tests."""

from tests.servers.redis.sentinel import RedisGroup, redis_group
from tests.servers.redis.server import RedisServer, redis_program, redis_server

__all__ = ["RedisGroup", "RedisServer", "redis_group", "redis_program", "redis_server"]
