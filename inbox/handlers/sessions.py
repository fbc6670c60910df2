"""Derive the executor and the number of connections from a session factory."""

import contextvars
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import AssertionPool, QueuePool, StaticPool

from pillarbox.inbox.connection import bind_of
from pillarbox.inbox.handlers.executor import Executor
from pillarbox.inbox.handlers.pool_executors import PoolExecutor
from pillarbox.inbox.handlers.pools import AnyPool, check_pool, is_pool, url_of
from pillarbox.inbox.idle import DEFAULT_MAX_IDLE
from pillarbox.outbox.errors import ConfigError, shorten
from pillarbox.outbox.postgres.connection import conninfo, libpq_url
from pillarbox.outbox.session import is_async_sessionmaker

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

OneKind: TypeAlias = (
    "async_sessionmaker[AsyncSession] | sessionmaker[Session] | AnyPool"
)
Sessions: TypeAlias = (
    "OneKind | tuple[async_sessionmaker[AsyncSession], sessionmaker[Session]]"
)
"""A session factory, one of each kind for the same database, or a psycopg pool."""

DEFAULT_IN_FLIGHT: Final = 64


@dataclass(frozen=True, slots=True)
class PoolLimit:
    """The maximum number of connections, and the settings that set it.

    Attributes:
        spare: the connections that handlers leave to heartbeats.
        is_shared: whether every session uses the same connection at the same time.
    """

    connections: int
    settings: str
    spare: int = 1
    is_shared: bool = False

    def check(self, max_in_flight: int, needed: int) -> None:
        """Refuse a number of handlers that exceeds the number of connections.

        Args:
            needed: connections for handlers and for the renewal of their leases.

        Raises:
            ConfigError: the pool is too small.
        """
        if needed > self.connections:
            raise ConfigError(
                f"max_in_flight={max_in_flight}: needs {needed} connections, but the"
                f" pool of sessions has at most {self.connections} ({self.settings});"
                " enlarge the pool, or set"
                f" max_in_flight={self.connections - (needed - max_in_flight)}"
            )

    @property
    def max_in_flight(self) -> int:
        """The number of handlers that leaves connections free for heartbeats."""
        return max(1, min(DEFAULT_IN_FLIGHT, self.connections - self.spare))


def pool_limit(sessions: object) -> PoolLimit | None:
    """Return how many connections the sessions share; None if the limit is unknown.

    Of both kinds, the lower limit counts, since either may have to run all handlers.
    """
    if isinstance(sessions, tuple):
        limits = [limit for one in sessions if (limit := pool_limit(one)) is not None]
        return min(limits, key=lambda limit: limit.connections, default=None)
    if is_pool(sessions):
        most = sessions.max_size  # 0: a NullConnectionPool without a limit
        return PoolLimit(most, f"max_size={most}", spare=0) if most else None
    bind = _find_bind(sessions)
    if isinstance(bind, Connection):  # whose transactions take turns, however many
        return PoolLimit(sys.maxsize, "a connection", is_shared=True)
    if bind is None:
        return None
    match pool := bind.pool:
        case StaticPool() | AssertionPool():
            return PoolLimit(1, type(pool).__name__, is_shared=True)
        case QueuePool() if pool.size() > 0:
            overflow = getattr(pool, "_max_overflow", -1)
            if overflow < 0:
                return None
            return PoolLimit(
                pool.size() + overflow,
                f"pool_size={pool.size()}, max_overflow={overflow}",
            )
    return None


def database_url(sessions: object) -> str:
    """Return the URL of the sessions' database, as libpq understands it.

    Settings in the engine's `connect_args` or `creator` aren't included.

    Raises:
        ConfigError: the engine is unknown, or isn't for PostgreSQL.
    """
    if is_pool(sessions):
        return url_of(sessions)
    engine = _find_bind(sessions)
    if not isinstance(engine, Engine):
        raise ConfigError(
            "sessions: the database is unknown because no engine is bound; bind the"
            " session factory to an engine"
        )
    url = engine.url
    query = dict(url.query)
    if url.drivername.endswith("+asyncpg"):
        # asyncpg has its own parameters; this one accepts the values of sslmode.
        ssl = query.get("ssl")
        query = {} if ssl is None else {"sslmode": ssl}
    text = libpq_url(url.set(drivername=url.get_backend_name(), query=query))
    conninfo(text)
    return text


def has_fixed_password(sessions: object) -> bool:
    """Return whether each session gets the same password, as far as one can tell."""
    bind = None if is_pool(sessions) else _find_bind(sessions)
    try:
        known = conninfo_to_dict(conninfo(database_url(sessions)))
    except ConfigError:
        return False
    # A listener of this event can replace it, as for tokens that expire.
    is_asked = bind is not None and len(bind.dialect.dispatch.do_connect) > 0
    return "password" in known and not is_asked


def _find_bind(sessions: object) -> Engine | Connection | None:
    if isinstance(sessions, tuple):
        sessions = sessions[0]
    if not callable(sessions):
        return None  # refused elsewhere
    try:
        session: Any = sessions()
        session = getattr(session, "sync_session", session)
        # A router may note in the context that it has written.
        return contextvars.copy_context().run(bind_of, session)
    except (SQLAlchemyError, ConfigError):
        return None  # bound later, or refused when the consumer starts


def check_joined(sessions: Any) -> None:
    """Refuse sessions whose rollback would be that of a whole test's transaction.

    Raises:
        ConfigError: they are such.
    """
    bind = None if is_pool(sessions) else _find_bind(sessions)
    if not isinstance(bind, Connection) or not bind.in_transaction():
        return
    one = (sessions[0] if isinstance(sessions, tuple) else sessions)()
    mode = getattr(one, "sync_session", one).join_transaction_mode
    is_nested = mode == "conditional_savepoint" and bind.in_nested_transaction()
    if mode != "create_savepoint" and not is_nested:
        raise ConfigError(
            f"sessions {shorten(sessions)}: join an outer transaction, which a failing "
            "handler would roll back; pass the session factory "
            'join_transaction_mode="create_savepoint"'
        )


def make_executor(
    sessions: Sessions,
    consumer: str,
    max_in_flight: int,
    max_idle: timedelta | None = DEFAULT_MAX_IDLE,
) -> Executor:
    """Create the executor for a session factory.

    Raises:
        ConfigError: it isn't a session factory.
    """
    given: Any = sessions
    if is_pool(given):
        check_pool(given)
        return PoolExecutor(given, consumer, max_in_flight, max_idle)
    if is_async_sessionmaker(given):
        given = (given, None)
    elif isinstance(given, sessionmaker):
        given = (None, given)
    match given:
        case (coroutines, threads) if (
            coroutines is None or is_async_sessionmaker(coroutines)
        ) and isinstance(threads, sessionmaker | None):
            return Executor(
                consumer,
                max_in_flight,
                max_idle,
                coroutines=coroutines,
                threads=threads,
                takes_turns=(limit := pool_limit(sessions)) is not None
                and limit.is_shared,
            )
    raise ConfigError(
        f"sessions {shorten(sessions)}: isn't a session factory; pass SQLAlchemy's "
        "async_sessionmaker(engine) or sessionmaker(engine), both in this order as a "
        "tuple, or a pool of psycopg_pool"
    )
