"""One attempt to handle messages: what happens in its transaction besides the handler.

Both executors run it: `begin`, and the handler if there is something to handle.
"""

import asyncio
import inspect
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

import psycopg
from psycopg.rows import tuple_row
from sqlalchemy.orm import Session

from pillarbox.inbox.errors import InvalidReceiptError
from pillarbox.inbox.handlers.calls import Call
from pillarbox.inbox.handlers.registration import Registered
from pillarbox.inbox.handlers.signature import Takes, is_async, refuse_unrun
from pillarbox.inbox.handlers.terms import as_failure
from pillarbox.inbox.idle import limit_idle
from pillarbox.inbox.receipt import record_receipt, record_receipts
from pillarbox.inbox.transaction import Receipt
from pillarbox.outbox.errors import ConfigError, DatabaseUnavailableError, one_line
from pillarbox.outbox.message import Message
from pillarbox.outbox.postgres.connection import ANSWER_LIMIT

T = TypeVar("T")


async def answered(asking: Awaitable[T], max_idle: timedelta | None) -> T:
    """Await what asks the database; limit how long that can take.

    The INSERT of a receipt waits while a frozen process holds the same one.

    Raises:
        DatabaseUnavailableError: it didn't answer.
    """
    limit = _answer_limit(max_idle)
    try:
        async with asyncio.timeout(limit):
            return await asking
    except TimeoutError as error:
        raise DatabaseUnavailableError(
            f"no answer from the database within {limit:g} s"
        ) from error


def _answer_limit(max_idle: timedelta | None) -> float | None:
    return None if max_idle is None else max_idle.total_seconds() + ANSWER_LIMIT


async def awaited(result: Any) -> Any:
    """Return the result of a call; await that of an async session or connection."""
    return await result if inspect.isawaitable(result) else result


async def execute(connection: Any, statement: Any, values: Any) -> Any:
    """Execute a statement on a psycopg connection; return a cursor of tuples."""
    is_async = isinstance(connection, psycopg.AsyncConnection)
    kind: Any = psycopg.AsyncCursor if is_async else psycopg.Cursor
    cursor = kind(connection, row_factory=tuple_row)
    return await awaited(cursor.execute(statement, values))


def run_now(function: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
    """Run a coroutine function that never waits, without an event loop."""
    try:
        function(*arguments).send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError(f"{function} waits")


class Questions:
    """The connections on which threads wait, since threads can't be cancelled."""

    def __init__(self, max_idle: timedelta | None) -> None:
        self._max_idle = max_idle
        self._since: dict[Any, float] = {}

    @contextmanager
    def asked(self, asking: Any) -> Iterator[None]:
        """Note that a session, or a driver's connection, is used in the block."""
        self._since[asking] = time.monotonic()
        try:
            yield
        finally:
            del self._since[asking]

    def abandon(self) -> None:
        """Break the connections that have waited for longer than `answered` allows."""
        limit = _answer_limit(self._max_idle)
        for asking, since in list(self._since.items()):
            if limit is not None and time.monotonic() > since + limit:
                with suppress(Exception):  # it has ended just now
                    _break(asking)


def _break(asking: Any) -> None:
    drivers = [asking]
    if isinstance(asking, Session):
        # Those that the session uses; SQLAlchemy has no other way to list them.
        connections: Any = vars(asking.get_transaction())["_connections"]
        drivers = [it.connection.driver_connection for it, *_ in connections.values()]
    for driver in drivers:
        with socket.socket(fileno=os.dup(driver.fileno())) as opened:
            opened.shutdown(socket.SHUT_RDWR)


async def call_async(handler: Callable[..., Any], *arguments: Any) -> Any:
    """Await a handler; a cancellation that it left pending is raised here."""
    result = await handler(*arguments)
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        await asyncio.sleep(0)  # a pending cancellation must not arrive in COMMIT
    return result


def once_each(messages: Sequence[Message], new: set[UUID]) -> list[Message]:
    """Return the messages with these ids; of those that came twice, the first."""
    return list({m.id: m for m in reversed(messages) if m.id in new}.values())[::-1]


@dataclass(frozen=True)
class Attempt:
    """A call of a handler in a transaction.

    Attributes:
        messages: one, unless it is a batch.
        max_idle: how long the transaction can be idle.
    """

    handler: Registered
    messages: Sequence[Message]
    consumer: str
    max_idle: timedelta | None
    running: Call

    def begin(self, session: Session) -> list[Message]:
        """Record the receipts; return the messages that the handler must handle.

        Raises:
            DatabaseUnavailableError: the transaction can't begin.
            InvalidReceiptError: a receipt can't be recorded.
            ConfigError: handlers can't use such a session.
        """
        limit_idle(session, self.max_idle)
        try:
            new = self._record(session)
        except (InvalidReceiptError, ConfigError):
            raise
        except Exception as error:
            # A new connection may reach the primary; or a task of an earlier handler
            # may have left this one in a transaction.
            session.invalidate()
            raise DatabaseUnavailableError(one_line(error)) from error
        return once_each(self.messages, new)

    def receipts(self, new: Sequence[Message]) -> list[Receipt]:
        """Return the receipts that `begin` has recorded."""
        return [(message.id, self.consumer) for message in new]

    async def call(self, first: Any, new: list[Message]) -> None:
        """Call the handler with a session or connection."""
        message = self._upcast(new)
        terms, call = self.handler.terms, self.handler.call
        with terms.timed(call):
            arguments = terms.arguments.of(first, message)
            if is_async(call):
                limit = terms.time_limit
                seconds = None if limit is None else limit.total_seconds()
                async with asyncio.timeout(seconds):
                    result = await call_async(call, *arguments)
            else:
                with as_failure():
                    result = call(*arguments)
            refuse_unrun(call, result)

    async def settle(self, first: Any) -> None:
        """Do what belongs in the transaction after the handler; this one does nothing.

        The handler has left the transaction intact.
        """

    def _upcast(self, new: list[Message]) -> Message | list[Message]:
        self.running.began = time.monotonic()
        # A message is upcast before it joins a batch, so it fails alone.
        is_batch = self.handler.takes is Takes.MANY
        return new if is_batch else self.handler.terms.upcast(new[0])

    def _record(self, session: Session) -> set[UUID]:
        ids = [message.id for message in self.messages]
        if self.handler.takes is Takes.MANY:
            return record_receipts(session, ids, self.consumer)
        return set(ids) if record_receipt(session, ids[0], self.consumer) else set()
