"""Create a Redis client from a URL, for the publisher and the source."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from redis.asyncio import Connection, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from typing_extensions import override

from outbox.errors import BrokerRefusedError, BrokerUnavailableError, ConfigError
from outbox.gather import cancellable
from outbox.url import split, without_password

_BROKEN: Final = (RedisError, OSError)
_TLS: Final = re.compile(r"(?:^|&)(ssl_[a-z_]+)=")
_SETTINGS: Final[dict[str, Any]] = {
    "protocol": 2,
    "socket_connect_timeout": 10,
    "socket_timeout": 30,
    "socket_keepalive": True,
}


class _Connection(Connection):
    """A connection that reports a closed transport as a ConnectionError.

    On a closed asyncio transport, `writelines()` raises TypeError in Python 3.13.5; in
    3.11 it ignores the data.
    """

    @override
    async def send_packed_command(self, *arguments: Any, **options: Any) -> None:
        try:
            await super().send_packed_command(*arguments, **options)
        except TypeError as error:
            raise RedisConnectionError("the connection was cut") from error


def redis_client(url: str) -> Redis:
    """Create a client, which connects with its first command.

    Raises:
        ConfigError: the URL is invalid.
    """
    name = without_password(url)
    if not split(url).hostname:
        raise ConfigError(f"broker URL {name}: write redis://host:port/0")
    database = url.partition("?")[0].partition("://")[2].partition("/")[2]
    if database and not database.isdecimal():
        raise ConfigError(
            f"broker URL {name}: {database!r} is not the number of a Redis database; "
            "write redis://host:port/0"
        )
    if url.startswith("redis:") and (tls := _TLS.search(url.partition("?")[2])):
        raise ConfigError(f"broker URL {name}: {tls[1]} needs rediss://")
    try:
        # A retry inside the client would silently repeat commands.
        client = Redis.from_url(url, retry=Retry(NoBackoff(), 0), **_SETTINGS)
        pool = client.connection_pool
        # TLS uses a different transport.
        if pool.connection_class is Connection:
            pool.connection_class = _Connection
        pool.make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"broker URL {name}: {error}") from None
    return client


async def refuse_cluster(client: Redis, url: str) -> None:
    """Refuse a server that can't hold all streams, or any.

    Raises:
        ConfigError: it is a node of a Redis Cluster, or a Sentinel.
        RedisError: it is unreachable, or rejects the connection.
    """
    try:
        answer = await client.execute_command("HELLO")  # type: ignore[no-untyped-call]
    except ResponseError:
        return  # older than Redis 6, a proxy, or no permission
    mode = dict(zip(answer[::2], answer[1::2], strict=True)).get(b"mode")
    if mode in {b"cluster", b"sentinel"}:
        raise ConfigError(
            f"broker {without_password(url)}: runs in {mode.decode()} mode, "
            "which isn't supported; name a server that isn't part of a Redis Cluster"
        )


async def close_client(client: Redis) -> None:
    """Close all connections of a client; if cancelled, some close a moment later."""
    # redis-py closes each connection in a task. Without the shield, a cancellation
    # would end that task before its first step.
    await asyncio.shield(client.aclose())


@contextmanager
def redis_errors(url: str) -> Iterator[None]:
    """Raise `BrokerUnavailableError` if Redis is unavailable; see `cancellable`."""
    try:
        with cancellable():
            yield
    except _BROKEN as error:
        raise _unavailable(url, error) from error


def _unavailable(url: str, error: BaseException) -> BrokerUnavailableError:
    if isinstance(error, AuthenticationError):
        return BrokerRefusedError(
            f"broker {without_password(url)} rejected the connection: {error}"
        )
    if isinstance(error, ResponseError):
        problem = f"can't process commands now: {error}"
    else:
        problem = f"can't be reached: {str(error) or type(error).__name__}"
    return BrokerUnavailableError(f"broker {without_password(url)} {problem}")
