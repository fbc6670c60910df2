"""Run handlers, each in a transaction after its receipt.

Coroutine functions run in the event loop with an `AsyncSession`, plain functions in
threads with a `Session`. A consumer can have sessions of either kind, or of both.
"""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractAsyncContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.orm import Session, sessionmaker

from pillarbox.inbox.connection import connection_of
from pillarbox.inbox.errors import SpecialError
from pillarbox.inbox.handlers.arguments import Arguments
from pillarbox.inbox.handlers.attempt import (
    Attempt,
    Questions,
    answered,
    call_async,
    run_now,
)
from pillarbox.inbox.handlers.calls import Calls
from pillarbox.inbox.handlers.registration import Registered
from pillarbox.inbox.handlers.routes import Handler, name_of
from pillarbox.inbox.handlers.signature import is_async, refuse_unrun
from pillarbox.inbox.handlers.terms import as_failure
from pillarbox.inbox.idle import limit_idle, limiting
from pillarbox.inbox.jobs.job import AnyJob, AsyncJob, Job
from pillarbox.inbox.jobs.store import Leased
from pillarbox.inbox.processing import traced
from pillarbox.inbox.transaction import hold, protected
from pillarbox.outbox.errors import ConfigError, DatabaseUnavailableError, sqlstate_of
from pillarbox.outbox.message import Message
from pillarbox.outbox.postgres.remedy import READ_ONLY
from pillarbox.outbox.postgres.sql_files import load

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

T = TypeVar("T")

_TABLES: Final = text(
    "SELECT 1 FROM inbox.receipt, inbox.foreign_receipt, inbox.dead_letter,"
    " inbox.suspect LIMIT 0"
)
# Threads for short statements, which must never wait for a handler.
_MAX_BOOKKEEPERS: Final = 4
# Longer than such statements take, and shorter than a stop can take during an outage
# of the database.
_LAST_BOOK: Final = 5.0


class Executor:
    """Runs coroutine functions in the event loop, and plain functions in threads.

    A few more threads do the bookkeeping: leases must be renewed even while handlers
    use all of their threads.

    Args:
        coroutines: the sessions of coroutine functions; None to refuse these.
        threads: the sessions of plain functions; None to refuse these.
        takes_turns: whether all sessions use one connection, so that their transactions
            can't be interleaved.

    Attributes:
        calls: those in progress; the owner of the executor sets their `notify`.
    """

    def __init__(
        self,
        consumer: str,
        max_in_flight: int,
        max_idle: timedelta | None,
        *,
        coroutines: "async_sessionmaker[AsyncSession] | None" = None,
        threads: sessionmaker[Session] | None = None,
        takes_turns: bool = False,
    ) -> None:
        self.has_coroutines = coroutines is not None
        self.has_threads = threads is not None
        # A task that outlives its handler must not use the session.
        self._sessions: Any = coroutines and partial(
            coroutines, close_resets_only=False
        )
        self._plain_sessions: Any = threads and partial(
            threads, close_resets_only=False
        )
        self.calls = Calls(consumer, max_idle)
        self._turn: AbstractAsyncContextManager[None] = (
            asyncio.Lock() if takes_turns else nullcontext()
        )
        self._consumer = consumer
        self._max_idle = max_idle
        self.questions = Questions(max_idle)
        self._handlers = _Threads(max_in_flight, f"inbox {consumer}")
        self._books = _Threads(_MAX_BOOKKEEPERS, f"inbox {consumer} books")

    def is_like(self, other: "Executor") -> bool:
        """Return whether it runs the same kinds of handlers."""
        return type(self) is type(other) and (
            (self.has_coroutines, self.has_threads)
            == (other.has_coroutines, other.has_threads)
        )

    @property
    def running_threads(self) -> int:
        """How many plain functions still run, which can't be stopped."""
        return len(self._handlers.running)

    def check(self, handler: Handler, arguments: Arguments) -> None:
        """Raise `ConfigError` for a handler that its sessions are not for."""
        name = name_of(handler)
        both = "pass both kinds: (async_sessionmaker(engine), sessionmaker(other))"
        if is_async(handler) and not self.has_coroutines:
            raise ConfigError(
                f"handler {name} is async, but sessions is a sessionmaker: write def,"
                f" or {both}"
            )
        if not is_async(handler) and not self.has_threads:
            raise ConfigError(
                f"handler {name} is a plain function, but sessions is an"
                f" async_sessionmaker: write async def, or {both}"
            )
        if arguments.takes_psycopg:
            raise ConfigError(
                f"handler {name}: takes a psycopg connection, but gets a SQLAlchemy"
                " session; annotate it with Session or AsyncSession, or pass the"
                " consumer a psycopg_pool.ConnectionPool or AsyncConnectionPool"
            )

    async def handle(
        self,
        handler: Registered,
        messages: Sequence[Message],
        make: Callable[..., Attempt] = Attempt,
    ) -> set[UUID]:
        """Run the handler and commit; return the ids of the new messages.

        Args:
            messages: one, unless it is a batch handler.
            make: makes the attempt.

        Raises:
            DatabaseUnavailableError: the handler was not called, for a reason other
                than the message.
        """
        running: Any
        async with self._turn:
            call = self.calls.begin(handler, messages[0])
            attempt = make(handler, messages, self._consumer, self._max_idle, call)
            if is_async(handler.call):
                running = _run_alone(self._attempt_async(attempt, as_failure()))
            else:
                running = self._handlers.run(run_now, self._attempt, attempt)
            try:
                new = await traced(messages, self._consumer, running)
            finally:
                self.calls.end(call)
        return cast("set[UUID]", new)

    async def _attempt_async(self, attempt: Attempt, failing: as_failure) -> set[UUID]:
        with limiting(self._max_idle) as own:
            async with self._sessions() as session, session.begin():
                try:
                    new = await answered(
                        session.run_sync(attempt.begin), self._max_idle
                    )
                except DatabaseUnavailableError:
                    # A task of an earlier handler may have left it in a transaction.
                    await session.invalidate()
                    raise
                if new:
                    with own:
                        async with protected(session, *attempt.receipts(new)):
                            with failing:
                                await attempt.call(session, new)
                    await attempt.settle(session)
        return {message.id for message in new}

    async def _attempt(self, attempt: Attempt) -> set[UUID]:
        with (
            limiting(self._max_idle) as own,
            self._plain_sessions() as session,
            session.begin(),
        ):
            with self.questions.asked(session):
                new = attempt.begin(session)
            if new:
                with own, protected(session, *attempt.receipts(new)):
                    await attempt.call(session, new)
                await attempt.settle(session)
        return {message.id for message in new}

    async def transact(self, function: Callable[[Session], T]) -> T:
        """Call a function with a session, in its own transaction."""
        async with self._turn:
            if not self.has_coroutines:
                return cast("T", await self._books.run(self._transact, function))
            async with self._sessions() as session, session.begin():
                limit_idle(session, self._max_idle)
                called = session.run_sync(_called, function)
                return cast("T", await answered(called, self._max_idle))

    def _transact(self, function: Callable[[Session], T]) -> T:
        with self._plain_sessions() as session, session.begin():
            limit_idle(session, self._max_idle)
            with self.questions.asked(session):
                return _called(session, function)

    def job(
        self, handler: Callable[..., Any], leased: Leased, message: Message
    ) -> AnyJob:
        """Create the job that is passed to a long handler."""
        if is_async(handler):
            return AsyncJob(self._sessions, leased, message, self._max_idle)
        return Job(self._plain_sessions, leased, message, self._max_idle)

    async def call(self, handler: Callable[..., Any], *arguments: Any) -> Any:
        """Call a handler, without a session or a transaction."""
        failing = as_failure()

        async def call() -> Any:
            with failing:
                return await call_async(handler, *arguments)

        async with self._turn:
            if is_async(handler):
                result = await _run_alone(call())
            else:
                result = await self._handlers.run(handler, *arguments)
        refuse_unrun(handler, result)
        return result

    async def probe(self) -> None:
        """Query the inbox's tables; raise any error that prevents it.

        Raises:
            ConfigError: handlers can't use such sessions.
        """
        if self.has_threads:
            await self._books.run(self._transact, _read_tables)
        if self.has_coroutines:
            async with self._sessions() as session:
                await session.run_sync(_read_tables)
        if self.has_threads and self.has_coroutines:
            one = await self.transact(identify)
            if await self._books.run(self._transact, identify) != one:
                raise ConfigError(
                    "sessions: the two session factories use different databases;"
                    " bind both to the one with the receipts"
                )

    async def open(self) -> None:
        """Open what handlers need; a start that fails later must not have done that."""

    async def close(self) -> None:
        """Release the threads, without waiting for handlers that are still running.

        Waits a short while for the executor's own transactions, so that none of their
        connections is in use when the engine is disposed of next.
        """
        await self._handlers.close()
        await self._books.close(patience=_LAST_BOOK)


def _read_tables(session: Session) -> None:
    hold(session).connection.execute(_TABLES)


def _called(session: Session, function: Callable[[Session], T]) -> T:
    """Call a function; close a connection on which nothing can be written."""
    try:
        return function(session)
    except Exception as error:
        if sqlstate_of(error) == READ_ONLY:
            session.invalidate()
        raise


def identify(session: Session) -> tuple[int, int]:
    """Return what tells the session's database apart from all others."""
    found = connection_of(session).execute(text(load("inbox", "identify_database")))
    cluster, database = found.one()
    return cluster, database


async def _run_alone(attempt: Coroutine[Any, Any, T]) -> T:
    """Run an attempt in a task and a copied context of its own.

    So whatever a handler does to its task and its context ends with the attempt. A
    cancellation of the caller cancels the attempt; the caller waits until it has ended.

    Raises:
        SpecialError: the attempt was cancelled, and not by its caller.
    """
    try:
        return await asyncio.create_task(attempt)
    except asyncio.CancelledError as error:
        caller = asyncio.current_task()
        if caller is None or caller.cancelling():
            raise
        raise SpecialError("the handler cancelled its own task") from error


def _call(function: Any, *arguments: Any) -> Any:
    with as_failure():
        return function(*arguments)


class _Threads:
    """Threads that start on demand, also after `close`."""

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._executor: ThreadPoolExecutor | None = None
        self.running: set[Future[Any]] = set()

    async def run(self, function: Any, *arguments: Any) -> Any:
        """Call a function in a thread, with the context of the current task."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._max_threads, self._name)
        context = contextvars.copy_context()
        call = self._executor.submit(context.run, _call, function, *arguments)
        self.running.add(call)
        call.add_done_callback(self.running.discard)
        return await asyncio.wrap_future(call)

    async def close(self, *, patience: float = 0.0) -> None:
        """End idle threads; wait for the others, since they can't be cancelled."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)
        if patience and (running := self.running.copy()):
            await asyncio.to_thread(wait, running, patience)
