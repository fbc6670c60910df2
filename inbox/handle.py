"""Run a handler in a transaction of its own, after its receipt.

Written twice, because the user's handlers have two colours: async ones run in the
loop with an `AsyncSession`, sync ones in a thread with a `Session`.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from sqlalchemy import Executable, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from inbox.errors import InvalidReceiptError
from inbox.idempotent import is_async, is_idempotent, record_receipt_async
from inbox.job import AnyJob, AsyncJob, Job
from inbox.jobs import JobKey, Leased
from inbox.receipt import record_receipt
from inbox.routes import AsyncHandler, Handler, SyncHandler, name_of
from outbox.errors import ConfigError, DatabaseUnavailableError, shorten
from outbox.message import Message

T = TypeVar("T")
Sessions: TypeAlias = async_sessionmaker[AsyncSession] | sessionmaker[Session]

_TABLES = text(
    "SELECT 1 FROM inbox.receipt, inbox.foreign_receipt, inbox.dead_letter LIMIT 0"
)


class Handling(Protocol):
    """Runs handlers of one colour."""

    def check(self, handler: Handler) -> None:
        """Refuse a handler of the other colour with a `ConfigError`."""

    async def handle(self, handler: Handler, message: Message) -> bool:
        """Run the handler and commit; tell whether the message was new.

        Raises:
            DatabaseUnavailableError: the handler was not reached, through no fault
                of the message.
        """

    async def execute(self, statement: Executable, values: dict[str, Any]) -> None:
        """Execute one statement and commit."""

    async def transact(self, function: Callable[[Session], T]) -> T:
        """Run a function of a session in a transaction of its own."""

    def job(self, key: JobKey, leased: Leased, message: Message) -> AnyJob:
        """Make what a long handler is called with."""

    async def call(self, handler: Callable[..., Any], *arguments: Any) -> Any:
        """Call a handler, without session or transaction."""

    def interrupt(self, call: asyncio.Future[Any]) -> None:
        """End a call, if a call of this colour can be ended."""

    async def probe(self) -> None:
        """Raise whatever there is to raise if the inbox's tables can't be read."""

    def close(self) -> None:
        """Let go of threads, without waiting for those that still run."""


def handling(sessions: Sessions, consumer: str, max_in_flight: int) -> Handling:
    """Choose by the kind of the session factory.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(sessions, async_sessionmaker):
        return AsyncHandling(sessions, consumer)
    if isinstance(sessions, sessionmaker):
        return SyncHandling(sessions, consumer, max_in_flight)
    raise ConfigError(
        f"sessions {shorten(sessions)}: isn't a session factory; pass SQLAlchemy's "
        "async_sessionmaker(engine) or sessionmaker(engine)"
    )


async def check_database(handling: Handling) -> None:
    """Look whether the inbox can be used.

    Raises:
        ConfigError: it isn't there, or is not for us.
        DatabaseUnavailableError: the database is away.
    """
    try:
        await handling.probe()
    except Exception as error:
        state = getattr(getattr(error, "orig", None), "sqlstate", None)
        if state in {"42P01", "3F000"}:
            raise ConfigError(
                "the database of sessions has no schema inbox: run outbox migrate "
                "--database URL for it"
            ) from error
        if state == "42501":
            raise ConfigError(
                f"the database of sessions: {one_line(error)}; grant the role "
                "pillarbox_consumer to its user"
            ) from error
        raise DatabaseUnavailableError(
            f"can't read the inbox in the database of sessions: {one_line(error)}"
        ) from error


class AsyncHandling:
    """Async handlers in the loop."""

    def __init__(
        self, sessions: async_sessionmaker[AsyncSession], consumer: str
    ) -> None:
        self._sessions = sessions
        self._consumer = consumer

    def check(self, handler: Handler) -> None:
        """Refuse a plain function."""
        if not is_async(handler):
            raise ConfigError(
                f"handler {name_of(handler)} is a plain function, and sessions an "
                "async_sessionmaker: write async def, or pass a sessionmaker"
            )

    async def handle(self, handler: Handler, message: Message) -> bool:
        """Run the handler in the running task."""
        async with self._sessions() as session, session.begin():
            try:
                await session.connection()
                is_new = is_idempotent(handler) or await record_receipt_async(
                    session, message.id, self._consumer
                )
            except InvalidReceiptError:
                raise
            except Exception as error:
                raise DatabaseUnavailableError(one_line(error)) from error
            if is_new:
                await cast("AsyncHandler", handler)(session, message)
        return is_new

    async def execute(self, statement: Executable, values: dict[str, Any]) -> None:
        """Execute in the running task."""
        async with self._sessions() as session, session.begin():
            await session.execute(statement, values)

    async def transact(self, function: Callable[[Session], T]) -> T:
        """Run in the running task."""
        async with self._sessions() as session, session.begin():
            return await session.run_sync(function)

    def job(self, key: JobKey, leased: Leased, message: Message) -> AsyncJob:
        """Make a job for a coroutine function."""
        return AsyncJob(self._sessions, key, leased, message)

    async def call(self, handler: Callable[..., Any], *arguments: Any) -> Any:
        """Call it in the running task."""
        return await handler(*arguments)

    def interrupt(self, call: asyncio.Future[Any]) -> None:
        """Cancel its task."""
        call.cancel()

    async def probe(self) -> None:
        """Read no row."""
        async with self._sessions() as session:
            await session.execute(_TABLES)

    def close(self) -> None:
        """There are no threads."""


class SyncHandling:
    """Sync handlers in threads, as many as may be in flight."""

    def __init__(
        self, sessions: sessionmaker[Session], consumer: str, max_in_flight: int
    ) -> None:
        self._sessions = sessions
        self._consumer = consumer
        self._max_threads = max_in_flight
        self._threads: ThreadPoolExecutor | None = None

    def check(self, handler: Handler) -> None:
        """Refuse a coroutine function."""
        if is_async(handler):
            raise ConfigError(
                f"handler {name_of(handler)} is async, and sessions a sessionmaker: "
                "write def, or pass an async_sessionmaker"
            )

    async def handle(self, handler: Handler, message: Message) -> bool:
        """Run the handler in a thread."""
        return cast("bool", await self._in_thread(self._handle, handler, message))

    async def execute(self, statement: Executable, values: dict[str, Any]) -> None:
        """Execute in a thread."""
        await self._in_thread(self._execute, statement, values)

    async def transact(self, function: Callable[[Session], T]) -> T:
        """Run in a thread."""
        return cast("T", await self._in_thread(self._transact, function))

    def job(self, key: JobKey, leased: Leased, message: Message) -> Job:
        """Make a job for a plain function."""
        return Job(self._sessions, key, leased, message)

    async def call(self, handler: Callable[..., Any], *arguments: Any) -> Any:
        """Call it in a thread."""
        return await self._in_thread(handler, *arguments)

    def interrupt(self, call: asyncio.Future[Any]) -> None:
        """Leave it: it sees that its job is cancelled."""

    async def probe(self) -> None:
        """Read no row."""
        await self._in_thread(self._execute, _TABLES, {})

    def close(self) -> None:
        """End idle threads; those at work end with their handler."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, function: Any, *arguments: Any) -> Any:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(
                self._max_threads, f"inbox {self._consumer}"
            )
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, context.run, function, *arguments
        )

    def _handle(self, handler: SyncHandler, message: Message) -> bool:
        with self._sessions() as session, session.begin():
            try:
                session.connection()
                is_new = is_idempotent(handler) or record_receipt(
                    session, message.id, self._consumer
                )
            except InvalidReceiptError:
                raise
            except Exception as error:
                raise DatabaseUnavailableError(one_line(error)) from error
            if is_new:
                handler(session, message)
        return is_new

    def _transact(self, function: Callable[[Session], T]) -> T:
        with self._sessions() as session, session.begin():
            return function(session)

    def _execute(self, statement: Executable, values: dict[str, Any]) -> None:
        with self._sessions() as session, session.begin():
            session.execute(statement, values)


def connection_broke(error: BaseException) -> bool:
    """Tell whether a handler failed because its connection was lost."""
    if not isinstance(error, DBAPIError):
        return False
    state = getattr(error.orig, "sqlstate", None) or ""
    return error.connection_invalidated or state[:2] == "08" or state[:4] == "57P0"


def one_line(error: BaseException) -> str:
    """Say an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
