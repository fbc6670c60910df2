"""Run plain functions in threads."""

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar, cast
from uuid import UUID

from sqlalchemy.orm import Session, sessionmaker

from inbox.handlers.arguments import Arguments
from inbox.handlers.attempt import Attempt
from inbox.handlers.executor import TABLES, as_failure, refuse_connections
from inbox.handlers.routes import BatchHandler, Handler, name_of
from inbox.handlers.signature import is_async, refuse_unrun
from inbox.idle import limit_idle
from inbox.jobs.job import Job
from inbox.jobs.store import JobKey, Leased
from inbox.processing import traced
from inbox.transaction import hold, protected
from outbox.errors import ConfigError
from outbox.message import Message

T = TypeVar("T")

# Threads for short statements, which must never wait for a handler.
_MAX_BOOKKEEPERS: Final = 4
# Longer than such statements take, and shorter than a stop can take during an outage
# of the database.
_LAST_BOOK: Final = 5.0


class ThreadExecutor:
    """Runs plain functions in threads, with a few more threads for bookkeeping.

    Leases must be renewed even while handlers use all of their threads.
    """

    def __init__(
        self,
        sessions: sessionmaker[Session],
        consumer: str,
        max_in_flight: int,
        max_idle: timedelta | None,
    ) -> None:
        # A thread that outlives its handler must not go on with the session.
        self._sessions = partial(sessions, close_resets_only=False)
        self._consumer = consumer
        self._max_idle = max_idle
        self._handlers = _Threads(max_in_flight, f"inbox {consumer}")
        self._books = _Threads(_MAX_BOOKKEEPERS, f"inbox {consumer} books")

    def check(self, handler: Handler, arguments: Arguments) -> None:
        """Refuse a coroutine function."""
        if is_async(handler):
            raise ConfigError(
                f"handler {name_of(handler)} is async, and sessions a sessionmaker: "
                "write def, or pass both kinds: "
                "(async_sessionmaker(engine), sessionmaker(other_engine))"
            )
        refuse_connections(handler, arguments)

    async def handle(self, handler: Handler, message: Message) -> bool:
        """Run the handler in a thread."""
        return bool(
            await self._run(Attempt(handler, [message], self._consumer, self._max_idle))
        )

    async def handle_batch(
        self, handler: BatchHandler, messages: Sequence[Message]
    ) -> set[UUID]:
        """Run the handler in a thread."""
        return await self._run(
            Attempt(handler, messages, self._consumer, self._max_idle, is_batch=True)
        )

    async def _run(self, attempt: Attempt) -> set[UUID]:
        running = self._handlers.run(self._attempt, attempt)
        return cast(
            "set[UUID]", await traced(attempt.messages, self._consumer, running)
        )

    async def transact(self, function: Callable[[Session], T]) -> T:
        """Run in a thread."""
        return cast("T", await self._books.run(self._transact, function))

    def job(
        self,
        handler: Callable[..., Any],
        key: JobKey,
        leased: Leased,
        message: Message,
    ) -> Job:
        """Create a job for a plain function."""
        return Job(self._sessions, key, leased, message, self._max_idle)

    async def call(self, handler: Callable[..., Any], *arguments: Any) -> Any:
        """Call the handler in a thread."""
        result = await self._handlers.run(handler, *arguments)
        refuse_unrun(handler, result)
        return result

    def interrupt(self, handler: Callable[..., Any], call: asyncio.Future[Any]) -> bool:
        """Do nothing: the handler sees that its job is cancelled when it checks."""
        return False

    async def probe(self) -> None:
        """Query the tables in a thread, without reading a row."""
        await self._books.run(self._probe)

    async def close(self) -> None:
        """End idle threads; busy ones end with their handlers."""
        await self._handlers.close()
        await self._books.close(patience=_LAST_BOOK)

    def _attempt(self, attempt: Attempt) -> set[UUID]:
        with self._sessions() as session, session.begin():
            new = attempt.begin(session)
            if new:
                handler = cast("Callable[..., Any]", attempt.handler)
                with protected(session, *attempt.receipts(new)):
                    handler(session, attempt.argument(new))
            return attempt.end(session, new)

    def _transact(self, function: Callable[[Session], T]) -> T:
        with self._sessions() as session, session.begin():
            limit_idle(session, self._max_idle)
            return function(session)

    def _probe(self) -> None:
        with self._sessions() as session, session.begin():
            hold(session).connection.execute(TABLES)


def _call(function: Any, *arguments: Any) -> Any:
    with as_failure():
        return function(*arguments)


class _Threads:
    """Threads that start on demand, also after `close`."""

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._executor: ThreadPoolExecutor | None = None
        self._running: set[Future[Any]] = set()

    async def run(self, function: Any, *arguments: Any) -> Any:
        """Call a function in a thread, with the context of the current task."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._max_threads, self._name)
        context = contextvars.copy_context()
        call = self._executor.submit(context.run, _call, function, *arguments)
        self._running.add(call)
        call.add_done_callback(self._running.discard)
        return await asyncio.wrap_future(call)

    async def close(self, *, patience: float = 0.0) -> None:
        """End idle threads; wait for the others, since they can't be cancelled."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)
        if patience and (running := self._running.copy()):
            await asyncio.to_thread(wait, running, patience)
