"""Run coroutine functions in the event loop."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from sqlalchemy.orm import Session

from inbox.handlers.arguments import Arguments
from inbox.handlers.attempt import Attempt
from inbox.handlers.executor import TABLES, as_failure, refuse_connections
from inbox.handlers.routes import BatchHandler, Handler, name_of
from inbox.handlers.signature import is_async, refuse_unrun
from inbox.idempotent import is_idempotent
from inbox.idle import limit_idle
from inbox.jobs.job import AsyncJob
from inbox.jobs.store import JobKey, Leased
from inbox.processing import traced
from inbox.transaction import hold, protected
from outbox.errors import ConfigError, DatabaseUnavailableError
from outbox.message import Message

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

T = TypeVar("T")


class AsyncExecutor:
    """Runs coroutine functions in the event loop."""

    def __init__(
        self,
        sessions: "async_sessionmaker[AsyncSession]",
        consumer: str,
        max_idle: timedelta | None,
    ) -> None:
        # A task that outlives its handler must not go on with the session.
        self._sessions = partial(sessions, close_resets_only=False)
        self._consumer = consumer
        self._max_idle = max_idle

    def check(self, handler: Handler, arguments: Arguments) -> None:
        """Refuse a plain function."""
        if not is_async(handler):
            raise ConfigError(
                f"handler {name_of(handler)} is a plain function, and sessions an "
                "async_sessionmaker: write async def, or pass both kinds: "
                "(async_sessionmaker(engine), sessionmaker(other_engine))"
            )
        refuse_connections(handler, arguments)

    async def handle(self, handler: Handler, message: Message) -> bool:
        """Run the handler in a task of its own."""
        return bool(
            await self._run(Attempt(handler, [message], self._consumer, self._max_idle))
        )

    async def handle_batch(
        self, handler: BatchHandler, messages: Sequence[Message]
    ) -> set[UUID]:
        """Run the handler in a task of its own."""
        return await self._run(
            Attempt(handler, messages, self._consumer, self._max_idle, is_batch=True)
        )

    async def _run(self, attempt: Attempt) -> set[UUID]:
        running = _run_alone(self._attempt(attempt, as_failure()))
        return await traced(attempt.messages, self._consumer, running)

    async def _attempt(self, attempt: Attempt, failing: as_failure) -> set[UUID]:
        async with self._sessions() as session, session.begin():
            try:
                new = await session.run_sync(attempt.begin)
            except DatabaseUnavailableError:
                # A task of an earlier handler may have left it in a transaction.
                await session.invalidate()
                raise
            if new:
                argument = attempt.argument(new)
                async with protected(session, *attempt.receipts(new)):
                    with failing:
                        await call_async(attempt.handler, session, argument)
            if not is_idempotent(attempt.handler):
                return {message.id for message in new}  # without a greenlet
            return await session.run_sync(attempt.end, new)

    async def transact(self, function: Callable[[Session], T]) -> T:
        """Run in the current task."""
        async with self._sessions() as session, session.begin():
            limit_idle(session, self._max_idle)
            return await session.run_sync(function)

    def job(
        self,
        handler: Callable[..., Any],
        key: JobKey,
        leased: Leased,
        message: Message,
    ) -> AsyncJob:
        """Create a job for a coroutine function."""
        return AsyncJob(self._sessions, key, leased, message, self._max_idle)

    async def call(self, handler: Callable[..., Any], *arguments: Any) -> Any:
        """Call the handler in a task of its own."""
        failing = as_failure()

        async def call() -> Any:
            with failing:
                result = await call_async(handler, *arguments)
                refuse_unrun(handler, result)
                return result

        return await _run_alone(call())

    def interrupt(self, handler: Callable[..., Any], call: asyncio.Future[Any]) -> bool:
        """Cancel the task of the call."""
        return call.cancel()

    async def probe(self) -> None:
        """Query the tables, without reading a row."""
        async with self._sessions() as session:
            await session.run_sync(lambda it: hold(it).connection.execute(TABLES))

    async def close(self) -> None:
        """Do nothing: there are no threads."""


async def call_async(handler: Callable[..., Any], *arguments: Any) -> Any:
    """Await a handler; a cancellation that it left pending is raised here."""
    result = await handler(*arguments)
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        await asyncio.sleep(0)  # a pending cancellation must not arrive in COMMIT
    return result


async def _run_alone(attempt: Coroutine[Any, Any, T]) -> T:
    """Run an attempt in a task and a copied context of its own.

    So whatever a handler does to its task and its context ends with the attempt. A
    cancellation of the caller cancels the attempt; the caller waits until it has ended.

    Raises:
        RuntimeError: the attempt was cancelled, and not by its caller.
    """
    try:
        return await asyncio.create_task(attempt)
    except asyncio.CancelledError as error:
        caller = asyncio.current_task()
        if caller is None or caller.cancelling():
            raise
        raise RuntimeError("the handler cancelled its own task") from error
