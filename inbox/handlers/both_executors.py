"""Run coroutine functions in the event loop, and plain functions in threads."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.orm import Session

from inbox.connection import connection_of
from inbox.handlers.arguments import Arguments
from inbox.handlers.async_executor import AsyncExecutor
from inbox.handlers.executor import Executor, refuse_connections
from inbox.handlers.routes import BatchHandler, Handler
from inbox.handlers.signature import is_async
from inbox.handlers.thread_executor import ThreadExecutor
from inbox.jobs.job import AnyJob
from inbox.jobs.store import JobKey, Leased
from outbox.errors import ConfigError
from outbox.message import Message
from outbox.postgres.sql_files import load

T = TypeVar("T")


class BothExecutors:
    """Runs each handler with sessions of its own kind, of the same database."""

    def __init__(self, coroutines: AsyncExecutor, threads: ThreadExecutor) -> None:
        self._coroutines = coroutines
        self._threads = threads

    def _of(self, handler: Callable[..., Any]) -> Executor:
        return self._coroutines if is_async(handler) else self._threads

    def check(self, handler: Handler, arguments: Arguments) -> None:
        """Accept both kinds."""
        refuse_connections(handler, arguments)

    async def handle(self, handler: Handler, message: Message) -> bool:
        """Run the handler in a task or in a thread."""
        return await self._of(handler).handle(handler, message)

    async def handle_batch(
        self, handler: BatchHandler, messages: Sequence[Message]
    ) -> set[UUID]:
        """Run the handler in a task or in a thread."""
        return await self._of(handler).handle_batch(handler, messages)

    async def transact(self, function: Callable[[Session], T]) -> T:
        """Run in the current task."""
        return await self._coroutines.transact(function)

    def job(
        self,
        handler: Callable[..., Any],
        key: JobKey,
        leased: Leased,
        message: Message,
    ) -> AnyJob:
        """Create a job for a handler of its kind."""
        return self._of(handler).job(handler, key, leased, message)

    async def call(self, handler: Callable[..., Any], *arguments: Any) -> Any:
        """Call the handler in a task or in a thread."""
        return await self._of(handler).call(handler, *arguments)

    def interrupt(self, handler: Callable[..., Any], call: asyncio.Future[Any]) -> bool:
        """Cancel the task of a coroutine function."""
        return self._of(handler).interrupt(handler, call)

    async def probe(self) -> None:
        """Query the tables with both kinds of sessions.

        Raises:
            ConfigError: they are of different databases.
        """
        await self._coroutines.probe()
        await self._threads.probe()
        one = await self._coroutines.transact(_identify)
        if await self._threads.transact(_identify) != one:
            raise ConfigError(
                "sessions: the two kinds are for different databases; a message's "
                "receipt is written by either, so both must be for the same one"
            )

    async def close(self) -> None:
        """End idle threads; busy ones end with their handlers."""
        await self._threads.close()


def _identify(session: Session) -> tuple[int, int]:
    found = connection_of(session).execute(text(load("inbox", "identify_database")))
    cluster, database = found.one()
    return cluster, database
