"""The locks for retries: one for each dead letter, and one for a consumer's schedule.

The handler runs after the lock of its dead letter and before the change of its state,
all in one transaction.
"""

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from sqlalchemy import LargeBinary, TextClause, text
from sqlalchemy.dialects.postgresql import JSONB, UUID
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from inbox.connection import connection_of
from inbox.handlers.batch import Batching
from inbox.handlers.routes import AsyncHandler, Handler, SyncHandler
from inbox.handlers.sessions import Sessions, first_of
from inbox.handlers.signature import is_async
from inbox.transaction import protected
from outbox.dead_letters import Candidate, Statement, lost_turn, statement
from outbox.message import Message
from outbox.postgres.advisory_lock import Lock, consumer_class
from outbox.session import is_async_sessionmaker

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession


_PARAMETER: Final = re.compile(r"%\((\w+)\)s")
# The only style in which psycopg reads timestamps; for this transaction only.
_READABLE: Final = text("SET LOCAL DateStyle = 'ISO'")
_TYPES: Final[Mapping[Statement, Mapping[str, Any]]] = {
    Statement.READ: {"id": UUID(), "headers": JSONB(), "payload": LargeBinary()},
    Statement.FIND_DUE: {"id": UUID()},
}


class TakenError(Exception):
    """Another session holds the dead letter or has already settled it."""


def locked_handler(handler: Handler | Batching, candidate: Candidate) -> Handler:
    """Wrap a handler so that it first locks the dead letter, and finally settles it.

    It raises `TakenError` if there is nothing to lock.
    """

    def lock(session: Session) -> None:
        lock_letter(session, candidate)

    def succeed(session: Session) -> None:
        _first(session, Statement.MARK_SUCCEEDED, candidate)

    # A batch handler gets the message as a batch of one.
    if is_async(handler.handler if isinstance(handler, Batching) else handler):
        handle_async = cast("AsyncHandler", handler)

        @functools.wraps(handler)
        async def handle_async_once(session: "AsyncSession", message: Message) -> None:
            await session.run_sync(lock)
            async with protected(session):
                await handle_async(session, message)
            await session.run_sync(succeed)

        return handle_async_once
    handle_sync = cast("SyncHandler", handler)

    @functools.wraps(handler)
    def handle_once(session: Session, message: Message) -> None:
        lock(session)
        with protected(session):
            handle_sync(session, message)
        succeed(session)

    return handle_once


def lock_letter(session: Session, candidate: Candidate) -> None:
    """Lock a PENDING dead letter until the transaction ends.

    Raises:
        TakenError: it isn't PENDING, or another session holds it.
    """
    connection_of(session).execute(_READABLE)
    _first(session, Statement.LOCK, candidate)


def _first(session: Session, name: Statement, candidate: Candidate) -> None:
    if (
        connection_of(session).execute(text_of(name), candidate.parameters()).first()
        is None
    ):
        raise TakenError


def run_statement(
    name: Statement, values: Mapping[str, Any], session: Session
) -> Sequence[Sequence[Any]]:
    """Run a statement on the inbox's dead letters and return its rows."""
    connection_of(session).execute(_READABLE)
    return [tuple(row) for row in connection_of(session).execute(text_of(name), values)]


@functools.cache
def text_of(name: Statement) -> TextClause:
    """Return a statement as an SQLAlchemy text clause, for any driver."""
    clause = text(_PARAMETER.sub(r":\1", statement("inbox", name)))
    return cast("TextClause", clause.columns(**_TYPES.get(name, {})))


_Run: TypeAlias = Callable[[Callable[[Session], Any]], Awaitable[Any]]


@asynccontextmanager
async def schedule_lock(sessions: Sessions, consumer: str) -> AsyncIterator[bool]:
    """Hold the lock during the block; yield False if another replica has it.

    Raises:
        DatabaseUnavailableError: the lock can't be requested, or was lost in the block.
    """
    lock = {"lock_class": consumer_class(consumer), "lock": int(Lock.DEAD_LETTERS)}
    async with _own_session(sessions) as run:
        try:
            taken = await run(
                lambda s: connection_of(s).scalar(text_of(Statement.TRY_LOCK), lock)
            )
        except Exception as error:
            raise lost_turn(error) from error
        yield bool(taken)
        try:
            await run(lambda s: s.commit())
        except Exception as error:
            raise lost_turn(error) from error


@asynccontextmanager
async def _own_session(sessions: Sessions) -> AsyncIterator[_Run]:
    """Open a session, and yield a function that calls another function with it."""
    sessions = first_of(sessions)
    if is_async_sessionmaker(sessions):
        session = sessions()
        try:
            yield session.run_sync
        finally:
            with suppress(SQLAlchemyError):
                await session.close()
        return
    # In a thread, because it may have to wait for the pool.
    held = sessions()

    async def run(function: Callable[[Session], Any]) -> Any:
        return await asyncio.to_thread(function, held)

    try:
        yield run
    finally:
        with suppress(SQLAlchemyError):
            await asyncio.to_thread(held.close)
