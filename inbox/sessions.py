"""Which way to handle, by the kind of the session factory."""

from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

from sqlalchemy.orm import Session, sessionmaker

from inbox.handle import Handling
from inbox.handle_in_loop import AsyncHandling
from inbox.handle_in_threads import SyncHandling
from inbox.idle import DEFAULT_MAX_IDLE
from outbox.errors import ConfigError, shorten
from outbox.session import is_async_sessionmaker

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

Sessions: TypeAlias = "async_sessionmaker[AsyncSession] | sessionmaker[Session]"


def handling(
    sessions: Sessions,
    consumer: str,
    max_in_flight: int,
    max_idle: timedelta | None = DEFAULT_MAX_IDLE,
) -> Handling:
    """Choose by the kind of the session factory.

    Raises:
        ConfigError: it is none.
    """
    if is_async_sessionmaker(sessions):
        return AsyncHandling(sessions, consumer, max_idle)
    if isinstance(sessions, sessionmaker):
        return SyncHandling(sessions, consumer, max_in_flight, max_idle)
    raise ConfigError(
        f"sessions {shorten(sessions)}: isn't a session factory; pass SQLAlchemy's "
        "async_sessionmaker(engine) or sessionmaker(engine)"
    )
