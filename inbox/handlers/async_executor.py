"""Run coroutine functions in the event loop."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import UUID

from sqlalchemy.orm import Session

from inbox.errors import InvalidReceiptError
from inbox.handlers.executor import TABLES, as_failure
from inbox.handlers.routes import AsyncHandler, BatchHandler, Handler, name_of
from inbox.handlers.signature import is_async, refuse_unrun
from inbox.idempotent import (
    is_idempotent,
    receipt_of,
    record_receipt_async,
    was_called,
)
from inbox.jobs.job import AsyncJob
from inbox.jobs.store import JobKey, Leased
from inbox.processing import traced
from inbox.receipt import handling, record_receipt, record_receipts
from inbox.transaction import hold, lent, limit_idle
from outbox.errors import (
    ConfigError,
    DatabaseUnavailableError,
    one_line,
)
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

    def check(self, handler: Handler) -> None:
        """Refuse a plain function."""
        if not is_async(handler):
            raise ConfigError(
                f"handler {name_of(handler)} is a plain function, and sessions an "
                "async_sessionmaker: write async def, or pass a sessionmaker"
            )

    async def handle(self, handler: Handler, message: Message) -> bool:
        """Run the handler in a task of its own."""
        attempt = _run_alone(self._handle(handler, message, as_failure()))
        return await traced([message], self._consumer, attempt)

    async def _handle(
        self, handler: Handler, message: Message, failing: as_failure
    ) -> bool:
        async with self._sessions() as session, session.begin():
            limit_idle(session, self._max_idle)
            try:
                held = await session.run_sync(hold)
                is_new = is_idempotent(handler) or await session.run_sync(
                    record_receipt, message.id, self._consumer
                )
            except (InvalidReceiptError, ConfigError):
                raise
            except Exception as error:
                # A task of an earlier handler may have left it in a transaction.
                await session.invalidate()
                raise DatabaseUnavailableError(one_line(error)) from error
            if is_new:
                ids = [] if is_idempotent(handler) else [message.id]
                async with lent(session):
                    with failing, handling(session, ids, self._consumer):
                        await _call(cast("AsyncHandler", handler), session, message)
            if is_idempotent(handler) and not was_called(session.sync_session):
                receipt = receipt_of(handler, message, self._consumer)
                await record_receipt_async(session, *receipt)
            # Only the @idempotent handler itself detects duplicates.
            return held.has_receipt

    async def handle_batch(
        self, handler: BatchHandler, messages: Sequence[Message]
    ) -> set[UUID]:
        """Run the handler in a task of its own."""
        attempt = _run_alone(self._handle_batch(handler, messages, as_failure()))
        return await traced(messages, self._consumer, attempt)

    async def _handle_batch(
        self, handler: BatchHandler, messages: Sequence[Message], failing: as_failure
    ) -> set[UUID]:
        async with self._sessions() as session, session.begin():
            limit_idle(session, self._max_idle)
            try:
                await session.run_sync(hold)
                new = await session.run_sync(
                    record_receipts, [m.id for m in messages], self._consumer
                )
            except (InvalidReceiptError, ConfigError):
                raise
            except Exception as error:
                # A task of an earlier handler may have left it in a transaction.
                await session.invalidate()
                raise DatabaseUnavailableError(one_line(error)) from error
            if new:
                async with lent(session):
                    new_ones = [m for m in messages if m.id in new]
                    with failing, handling(session, new, self._consumer):
                        await _call(handler, session, new_ones)
        return new

    async def transact(self, function: Callable[[Session], T]) -> T:
        """Run in the current task."""
        async with self._sessions() as session, session.begin():
            limit_idle(session, self._max_idle)
            return await session.run_sync(function)

    def job(self, key: JobKey, leased: Leased, message: Message) -> AsyncJob:
        """Create a job for a coroutine function."""
        return AsyncJob(self._sessions, key, leased, message, self._max_idle)

    async def call(self, handler: Callable[..., Any], *arguments: Any) -> Any:
        """Call the handler in a task of its own."""
        failing = as_failure()

        async def call() -> Any:
            with failing:
                return await _call(handler, *arguments)

        return await _run_alone(call())

    def interrupt(self, call: asyncio.Future[Any]) -> bool:
        """Cancel the task of the call."""
        return call.cancel()

    async def probe(self) -> None:
        """Query the tables, without reading a row."""
        async with self._sessions() as session:
            await session.run_sync(lambda it: hold(it).connection.execute(TABLES))

    async def close(self) -> None:
        """Do nothing: there are no threads."""


async def _call(handler: Callable[..., Any], *arguments: Any) -> Any:
    result = await handler(*arguments)
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        await asyncio.sleep(0)  # a pending cancellation must not arrive in COMMIT
    refuse_unrun(handler, result)
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
