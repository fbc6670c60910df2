"""psycopg pools in place of session factories: what they are, and how they connect.

Handlers get a connection of the pool. Everything else, such as dead letters, is written
on a few connections of a SQLAlchemy engine with the pool's parameters, so that it never
waits for a handler.
"""

import inspect
import sys
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import quote, urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import Engine, create_engine

from pillarbox.outbox.errors import ConfigError, shorten

if TYPE_CHECKING:
    from psycopg_pool import AsyncConnectionPool, ConnectionPool
    from sqlalchemy.ext.asyncio import AsyncEngine
    from typing_extensions import TypeIs

AnyPool: TypeAlias = "AsyncConnectionPool[Any] | ConnectionPool[Any]"

_URL: Final = "postgresql+psycopg://"
_MOST: Final = {"pool_size": 1, "max_overflow": 3}
# Of the pool's connections, not of how to connect; SQLAlchemy has its own.
_OF_CONNECTIONS: Final = {"autocommit", "context", "cursor_factory", "row_factory"}


def is_async_pool(value: object) -> "TypeIs[AsyncConnectionPool[Any]]":
    """Return whether a value is an `AsyncConnectionPool`."""
    found = sys.modules.get("psycopg_pool")
    return found is not None and isinstance(value, found.AsyncConnectionPool)


def is_pool(value: object) -> "TypeIs[AnyPool]":
    """Return whether a value is one of psycopg's pools."""
    found = sys.modules.get("psycopg_pool")
    kinds = found and (found.AsyncConnectionPool, found.ConnectionPool)
    return isinstance(value, kinds or ())


def check_pool(pool: AnyPool) -> None:
    """Refuse a pool whose connections don't tell that they were closed.

    Raises:
        ConfigError: it has `close_returns`.
    """
    if getattr(pool, "close_returns", False):
        raise ConfigError(
            f"sessions {shorten(pool)}: with close_returns=True, a handler's close()"
            " hands its connection to another handler; create the pool without it"
        )


def engine_of(pool: "ConnectionPool[Any]") -> Engine:
    """Return an engine that connects as the pool does."""

    def connect() -> Any:
        conninfo, settings = _called(pool.conninfo), _called(pool.kwargs)
        return pool.connection_class.connect(conninfo or "", **_how(settings))

    return create_engine(_URL, creator=connect, **_MOST)


def async_engine_of(pool: "AsyncConnectionPool[Any]") -> "AsyncEngine":
    """Return an engine that connects as the pool does."""
    from sqlalchemy.ext.asyncio import create_async_engine

    async def connect() -> Any:
        conninfo, settings = _called(pool.conninfo), _called(pool.kwargs)
        if inspect.isawaitable(conninfo):
            conninfo = await conninfo
        if inspect.isawaitable(settings):
            settings = await settings
        connect = pool.connection_class.connect
        return await connect(conninfo or "", **_how(settings))

    return create_async_engine(_URL, async_creator=connect, **_MOST)


def url_of(pool: AnyPool) -> str:
    """Return the URL of the pool's database.

    Raises:
        ConfigError: a function of the application decides how each connection connects.
    """
    conninfo, settings = pool.conninfo, pool.kwargs
    if callable(conninfo) or callable(settings):
        raise ConfigError(
            f"sessions {shorten(pool)}: the database is unknown because conninfo or"
            " kwargs is a function; pass them as values"
        )
    known = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}
    given = {
        name: to
        for name, to in (settings or {}).items()
        if name in known and to is not None
    }
    parameters = {**conninfo_to_dict(conninfo), **given}
    return f"postgresql://?{urlencode(parameters, quote_via=quote)}"


def _called(value: Any) -> Any:
    return value() if callable(value) else value


def _how(settings: dict[str, Any] | None) -> dict[str, Any]:
    return {
        name: to for name, to in (settings or {}).items() if name not in _OF_CONNECTIONS
    }
