"""Create a Redis client from a URL, for the publisher and the source."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

from redis.asyncio import Connection, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from typing_extensions import override

from pillarbox.outbox.errors import (
    BrokerRefusedError,
    BrokerUnavailableError,
    ConfigError,
)
from pillarbox.outbox.gather import cancellable
from pillarbox.outbox.url import split, without_password

_BROKEN: Final = (RedisError, OSError)
_TLS: Final = re.compile(r"(?:^|&)(ssl_[a-z_]+)=")
_SETTINGS: Final[dict[str, Any]] = {
    "protocol": 2,
    "socket_connect_timeout": 10,
    "socket_timeout": 30,
    "socket_keepalive": True,
    # A retry inside the client would silently repeat commands.
    "retry": Retry(NoBackoff(), 0),
}
# Usually shorter than a failover takes: a client that waits longer may get the answer
# of a frozen master when others have a new one.
_SENTINEL: Final[dict[str, Any]] = {"socket_connect_timeout": 2, "socket_timeout": 5}
_FORMS: Final = "redis://host:port/0", "redis+sentinel://host:26379,host:26379/master/0"
_OF_THE_MASTER: Final = ("username", "password", "db", "client_name")


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


class _ToMaster(_Connection, SentinelManagedConnection):
    """A connection to the master that the Sentinels name."""


def redis_client(url: str) -> Redis:
    """Create a client, which connects with its first command.

    Raises:
        ConfigError: the URL is invalid.
    """
    name, parts = without_password(url), split(url)
    kind, _, by_sentinel = parts.scheme.partition("+")
    form = _FORMS[bool(by_sentinel)]
    master, database = "", url.partition("?")[0].partition("://")[2].partition("/")[2]
    if by_sentinel:
        master, _, database = database.partition("/")
    if not parts.hostname or bool(by_sentinel) != bool(master):
        raise ConfigError(f"broker URL {name}: write {form}")
    if database and not database.isdecimal():
        raise ConfigError(
            f"broker URL {name}: {database!r} is not the number of a Redis database; "
            f"write {form}"
        )
    if kind == "redis" and (tls := _TLS.search(url.partition("?")[2])):
        raise ConfigError(
            f"broker URL {name}: {tls[1]} needs redis{parts.scheme[4:]}://"
        )
    try:
        if master:
            credentials, _, hosts = parts.netloc.rpartition("@")
            plain = f"{kind}://{credentials}@host/{database}?{parts.query}"
            client = _client_of_master(master, hosts.split(","), plain)
        else:
            client = Redis.from_url(url, **_SETTINGS)
        pool = client.connection_pool
        # TLS uses a different transport.
        if pool.connection_class is Connection:
            pool.connection_class = _Connection
        pool.make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"broker URL {name}: {error}") from None
    return client


def _client_of_master(master: str, hosts: Sequence[str], url: str) -> Redis:
    settings: dict[str, Any] = {**_SETTINGS, **_SENTINEL, **parse_url(url)}
    for name in ("host", "connection_class"):
        settings.pop(name, None)
    own = {
        name: settings.pop(f"sentinel_{name}", None)
        for name in ("username", "password")
    }
    has_tls = url.startswith("rediss")
    shared = {name: settings[name] for name in settings.keys() - set(_OF_THE_MASTER)}
    addresses = [urlsplit(f"//{host}") for host in hosts]
    sentinels = Sentinel(
        [(each.hostname, each.port or 26379) for each in addresses],
        sentinel_kwargs={**shared, **own, "ssl": has_tls},
    )  # type: ignore[no-untyped-call]
    connection = SentinelManagedSSLConnection if has_tls else _ToMaster
    client: Redis = sentinels.master_for(
        master, connection_class=connection, **settings
    )
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
            "which isn't supported; name a server that isn't part of a Redis Cluster, "
            f"or the Sentinels, as {_FORMS[1]}"
        )


async def close_client(client: Redis) -> None:
    """Close all connections of a client; if cancelled, some close a moment later."""
    # redis-py closes each connection in a task. Without the shield, a cancellation
    # would end that task before its first step.
    manager = getattr(client.connection_pool, "sentinel_manager", None)
    clients = [client, *(manager.sentinels if manager else ())]
    await asyncio.shield(asyncio.gather(*(each.aclose() for each in clients)))


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
    elif isinstance(error, MasterNotFoundError):
        # Its text has the settings of all clients.
        problem = "can't be reached: no Sentinel names a master that is up"
    else:
        problem = f"can't be reached: {str(error) or type(error).__name__}"
    return BrokerUnavailableError(f"broker {without_password(url)} {problem}")
