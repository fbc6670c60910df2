"""What a session factory decides: the executor, and how many connections it has."""

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sqlalchemy import Engine, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import AssertionPool, QueuePool, StaticPool

from inbox.handlers.async_executor import AsyncExecutor
from inbox.handlers.executor import Executor
from inbox.handlers.thread_executor import ThreadExecutor
from inbox.schema import receipt_table
from inbox.transaction import DEFAULT_MAX_IDLE
from outbox.errors import ConfigError, shorten
from outbox.session import is_async_sessionmaker

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

Sessions: TypeAlias = "async_sessionmaker[AsyncSession] | sessionmaker[Session]"

DEFAULT_IN_FLIGHT: Final = 64


@dataclass(frozen=True, slots=True)
class PoolLimit:
    """The maximum number of connections of an engine, and the settings that set it."""

    connections: int
    settings: str

    def check(self, max_in_flight: int, needed: int) -> None:
        """Refuse more handlers than there are connections for.

        Args:
            needed: connections, for handlers and for what keeps their leases.

        Raises:
            ConfigError: the pool is too small.
        """
        if needed <= self.connections:
            return
        spare = needed - max_in_flight
        besides = f" and {spare} for heartbeats" if spare > 0 else ""
        raise ConfigError(
            f"max_in_flight={max_in_flight}: needs {needed} connections{besides}, and "
            f"the engine of sessions has {self.connections} at most "
            f'({self.settings}): handlers would fail with "QueuePool limit"; '
            f"create_engine(…, pool_size={needed}), or set "
            f"max_in_flight={max(1, self.connections - max(0, spare))}"
        )

    @property
    def max_in_flight(self) -> int:
        """The number of handlers that leaves one connection for heartbeats."""
        return max(1, min(DEFAULT_IN_FLIGHT, self.connections - 1))


def pool_limit(sessions: object) -> PoolLimit | None:
    """Return how many connections the sessions share; None if no limit is known."""
    if not callable(sessions):
        return None  # refused elsewhere
    try:
        session: Any = sessions()
        session = getattr(session, "sync_session", session)
        engine = session.get_bind(clause=select(receipt_table))
    except SQLAlchemyError:
        return None  # it is bound later, or chooses its engine by something else
    if not isinstance(engine, Engine):
        return None
    match pool := engine.pool:
        case StaticPool() | AssertionPool():
            return PoolLimit(1, type(pool).__name__)
        case QueuePool() if pool.size() > 0:
            overflow = getattr(pool, "_max_overflow", -1)
            if overflow < 0:
                return None
            return PoolLimit(
                pool.size() + overflow,
                f"pool_size={pool.size()}, max_overflow={overflow}",
            )
    return None


def make_executor(
    sessions: Sessions,
    consumer: str,
    max_in_flight: int,
    max_idle: timedelta | None = DEFAULT_MAX_IDLE,
) -> Executor:
    """Make the executor for a session factory.

    Raises:
        ConfigError: it is not a session factory.
    """
    if is_async_sessionmaker(sessions):
        return AsyncExecutor(sessions, consumer, max_idle)
    if isinstance(sessions, sessionmaker):
        return ThreadExecutor(sessions, consumer, max_in_flight, max_idle)
    raise ConfigError(
        f"sessions {shorten(sessions)}: isn't a session factory; pass SQLAlchemy's "
        "async_sessionmaker(engine) or sessionmaker(engine)"
    )
