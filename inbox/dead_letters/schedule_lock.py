"""The lock by which the retry schedule of a consumer runs in one replica at a time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from inbox.handlers.locked_handler import text_of
from inbox.handlers.sessions import Sessions
from outbox.dead_letters import Statement, lost_turn
from outbox.postgres.advisory_lock import Lock, consumer_class
from outbox.session import is_async_sessionmaker

_Run: TypeAlias = Callable[[Callable[[Session], Any]], Awaitable[Any]]


@asynccontextmanager
async def schedule_lock(sessions: Sessions, consumer: str) -> AsyncIterator[bool]:
    """Hold the lock for the length of the block; give False if somebody else has it.

    Raises:
        DatabaseUnavailableError: it can't be asked for, or was lost in the block.
    """
    lock = {"lock_class": consumer_class(consumer), "lock": int(Lock.DEAD_LETTERS)}
    async with _aside(sessions) as run:
        try:
            taken = await run(lambda s: s.scalar(text_of(Statement.TRY_LOCK), lock))
        except Exception as error:
            raise lost_turn(error) from error
        yield bool(taken)
        try:
            await run(lambda s: s.commit())
        except Exception as error:
            raise lost_turn(error) from error


@asynccontextmanager
async def _aside(sessions: Sessions) -> AsyncIterator[_Run]:
    """Open a session; give what runs a function of it, in its own way."""
    if is_async_sessionmaker(sessions):
        session = sessions()
        try:
            yield session.run_sync
        finally:
            with suppress(SQLAlchemyError):
                await session.close()
        return
    # In a thread, for the pool may let it wait.
    held = sessions()

    async def run(function: Callable[[Session], Any]) -> Any:
        return await asyncio.to_thread(function, held)

    try:
        yield run
    finally:
        with suppress(SQLAlchemyError):
            await asyncio.to_thread(held.close)
