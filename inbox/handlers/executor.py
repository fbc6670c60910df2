"""The protocol for running handlers, each in a transaction after its receipt.

There are two executors because there are two kinds of handlers: coroutine functions run
in the event loop with an `AsyncSession`, plain functions in threads with a `Session`.
`prepare` wraps a handler in its `Terms`: the version that it understands, its time
limit, and which of its failures are permanent.
"""

import asyncio
import concurrent.futures
import contextvars
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar, cast
from uuid import UUID

import psycopg
from sqlalchemy import Row, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from inbox.connection import connection_of
from inbox.errors import (
    ConnectionLostError,
    DeadLetter,
    HandlerTimeoutError,
    RetryLater,
)
from inbox.handlers.arguments import AS_THEY_ARE, Arguments
from inbox.handlers.routes import (
    AsyncHandler,
    BatchHandler,
    Handler,
    SyncHandler,
    name_of,
)
from inbox.handlers.signature import is_async, refuse_unrun
from inbox.jobs.job import AnyJob
from inbox.jobs.store import JobKey, Leased
from outbox.duration import check_duration, exact_duration
from outbox.errors import (
    ConfigError,
    DatabaseUnavailableError,
    check_type,
    one_line,
    shorten,
    sqlstate_of,
)
from outbox.message import Message
from outbox.postgres.days import MAKE_DAYS
from outbox.postgres.sql_files import load
from outbox.retry import RetryPolicy

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession


T = TypeVar("T")

TABLES: Final = text(
    "SELECT 1 FROM inbox.receipt, inbox.foreign_receipt, inbox.dead_letter,"
    " inbox.suspect LIMIT 0"
)


_IDLE_IN_TRANSACTION: Final = "25P03"  # idle for longer than max_idle


class Executor(Protocol):
    """Runs handlers: coroutine functions, plain functions, or both."""

    def check(self, handler: Handler, arguments: Arguments) -> None:
        """Raise `ConfigError` for a handler of another kind."""

    async def handle(self, handler: Handler, message: Message) -> bool:
        """Run the handler and commit; return whether the message was new.

        Raises:
            DatabaseUnavailableError: the handler was not called, for a reason other
                than the message.
        """

    async def handle_batch(
        self, handler: BatchHandler, messages: Sequence[Message]
    ) -> set[UUID]:
        """Run a batch handler and commit; return the ids of the new messages.

        Raises:
            DatabaseUnavailableError: as `handle`.
        """

    async def transact(self, function: Callable[[Session], T]) -> T:
        """Call a function with a session, in its own transaction."""

    def job(
        self,
        handler: Callable[..., Any],
        key: JobKey,
        leased: Leased,
        message: Message,
    ) -> AnyJob:
        """Create the job that is passed to a long handler."""

    async def call(self, handler: Callable[..., Any], *arguments: Any) -> Any:
        """Call a handler, without a session or a transaction."""

    def interrupt(self, handler: Callable[..., Any], call: asyncio.Future[Any]) -> bool:
        """Interrupt a call of a handler, if its kind allows it; return whether."""

    async def probe(self) -> None:
        """Query the inbox's tables; raise any error that prevents it.

        Raises:
            ConfigError: handlers can't use such sessions.
        """

    async def close(self) -> None:
        """Release the threads, without waiting for handlers that are still running.

        Waits a short while for the executor's own transactions, so that none of their
        connections is in use when the engine is disposed of next.
        """


async def check_database(executor: Executor, *, is_long: bool) -> None:
    """Check that the inbox is usable.

    Args:
        is_long: whether there are long handlers, which also need `inbox.job`.

    Raises:
        ConfigError: the schema is missing, the session is in AUTOCOMMIT mode, or its
            role lacks the privilege to write to the inbox.
        DatabaseUnavailableError: the database is unavailable, or is a standby.
    """
    try:
        await executor.probe()
        rights = await executor.transact(partial(_read_rights, is_long))
    except ConfigError:
        raise
    except Exception as error:
        state = sqlstate_of(error)
        if state in {"42P01", "3F000"}:
            raise ConfigError(
                "the database of sessions has no schema inbox: run pillarbox migrate "
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
    _check_rights(rights)


def _read_rights(is_long: bool, session: Session) -> Row[Any]:
    statement = text(load("inbox", "read_rights"))
    return connection_of(session).execute(statement, {"is_long": is_long}).one()


def _check_rights(rights: Row[Any]) -> None:
    if rights.is_standby:
        raise DatabaseUnavailableError(
            "the database of sessions is a standby, which takes no receipts: use the "
            "URL of the primary"
        )
    if rights.is_read_only:
        raise ConfigError(
            "the database of sessions: transactions are read-only, and a consumer "
            "writes receipts; check default_transaction_read_only of the role "
            f"{rights.role!r}, in the database and in the URL"
        )
    if rights.missing:
        raise ConfigError(
            f"the database of sessions: the role {rights.role!r} lacks "
            f"{', '.join(rights.missing)}; GRANT pillarbox_consumer TO "
            f'"{rights.role}", or use a role that has it; if it has it, pillarbox '
            "migrate restores what was revoked"
        )
    if rights.hiding:
        raise ConfigError(
            f"the database of sessions: row-level security of {rights.hiding[0]} in the"
            f" schema inbox hides rows from the role {rights.role!r}; run pillarbox "
            "doctor, which prints the statements that disable it"
        )


def refuse_connections(handler: Handler, arguments: Arguments) -> None:
    """Raise `ConfigError` for a handler that takes a connection, not a session."""
    if arguments.takes_psycopg:
        raise ConfigError(
            f"handler {name_of(handler)}: takes a connection of psycopg, and gets a "
            "session of SQLAlchemy; annotate it with Session or AsyncSession, or pass "
            "the consumer a psycopg_pool.ConnectionPool or AsyncConnectionPool"
        )


def make_days(session: Session) -> list[Any]:
    """Create the missing partitions of all tables; return what failed."""
    return list(connection_of(session).execute(text(MAKE_DAYS)))


def connection_broke(error: BaseException) -> bool:
    """Return whether an error means that the connection was lost or terminated."""
    state = sqlstate_of(error) or ""
    if isinstance(error, ConnectionLostError):
        return True
    if isinstance(error, psycopg.Error):  # of a connection without SQLAlchemy
        is_lost = False
    elif isinstance(error, DBAPIError):
        is_lost = error.connection_invalidated
    else:
        # asyncpg raises it for a statement that is executed after the server's FATAL
        # and before the connection is closed. SQLAlchemy 2.0 doesn't wrap it.
        return type(error).__name__ == "InternalClientError"
    return (
        is_lost
        or state[:2] == "08"
        or state[:4] == "57P0"
        or state == _IDLE_IN_TRANSACTION
    )


class as_failure:  # noqa: N801 (reads as a statement: with as_failure(): …)
    """Make whatever a handler raises in the block an `Exception`: its attempt failed.

    Anything else would end the event loop, or get lost in a future. In a task, a
    cancellation of its caller and KeyboardInterrupt pass.

    Raises:
        RuntimeError: the handler raised SystemExit, GeneratorExit, StopIteration, a
            `CancelledError` of its own or another `BaseException`.
    """

    __slots__ = ("_caller", "_task")

    def __init__(self) -> None:
        """Remember the task that waits for the handler; in a thread there is none."""
        self._caller = _current_task()

    def __enter__(self) -> None:
        """Remember the handler's own task."""
        self._task = _current_task()

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        """Raise an ordinary error instead of a special one."""
        match error:
            case None:
                return
            case KeyboardInterrupt():
                if self._caller is not None:  # it can be a signal's
                    return
            case asyncio.CancelledError():
                if self._caller is not None and self._caller.cancelling():
                    return
            case GeneratorExit():
                # The task was closed, or its garbage was collected.
                if self._task is not _current_task():
                    return
            case Exception() if not isinstance(error, _SPECIAL):
                return
        text = one_line(error).rstrip(": ")
        raise RuntimeError(f"the handler raised {text}") from error


def call_alone(function: Callable[..., T], *arguments: Any) -> T:
    """Call a plain function of the user outside an attempt, in a context of its own.

    Raises:
        Exception: as `as_failure`.
    """
    with as_failure():
        return contextvars.copy_context().run(function, *arguments)


# A future refuses the first, and takes the second for its own cancellation.
_SPECIAL: Final = (StopIteration, concurrent.futures.CancelledError)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None  # no event loop runs here


Permanent: TypeAlias = (
    type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], bool]
)


@dataclass(frozen=True, slots=True)
class Terms:
    """How a handler is called.

    Attributes:
        upcast: upcasts a message to the version that the handler understands.
        time_limit: after this time the handler's work is rolled back, and the attempt
            fails. A plain function can't be stopped: it keeps its slot until it
            returns.
        permanent: the exceptions that no retry would fix.
        retry: the number of attempts and the backoff; None: the consumer's.
        arguments: what the handler takes, in its order.
    """

    upcast: Callable[[Message], Message]
    time_limit: timedelta | None = None
    permanent: Permanent = ()
    retry: RetryPolicy | None = None
    arguments: Arguments = AS_THEY_ARE

    def __post_init__(self) -> None:
        """Refuse invalid terms."""
        if self.time_limit is not None:
            check_duration("time_limit", self.time_limit)
            if self.time_limit <= timedelta(0):
                raise ConfigError(
                    f"time_limit={exact_duration(self.time_limit)}: must be above 0s"
                )
        if self.retry is not None:
            check_type("retry", self.retry, RetryPolicy, "pass RetryPolicy(…)")
        given: object = self.permanent
        if callable(given) and not isinstance(given, type):
            return
        for kind in given if isinstance(given, tuple) else (given,):
            if not isinstance(kind, type) or not issubclass(kind, Exception):
                raise ConfigError(
                    f"permanent {shorten(kind)}: isn't an exception class; pass "
                    "classes, or a predicate"
                )

    def classify(self, error: Exception) -> None:
        """Raise `DeadLetter` for an error that no retry would fix.

        Never raises it for decisions and lost connections, whatever `permanent` says.
        """
        if isinstance(error, RetryLater | DeadLetter) or connection_broke(error):
            return
        if isinstance(self.permanent, type | tuple):
            is_permanent = isinstance(error, self.permanent)
        else:
            is_permanent = call_alone(self.permanent, error)
        if is_permanent:
            raise DeadLetter(one_line(error)) from error

    def check_time(self, handler: Handler, seconds: float) -> None:
        """Raise `HandlerTimeoutError` if a handler exceeded its time limit."""
        limit = self.time_limit
        if limit is not None and seconds > limit.total_seconds():
            raise HandlerTimeoutError(name_of(handler), limit)


def prepare(handler: Handler, terms: Terms) -> Handler:
    """Wrap a handler so that it follows the terms."""
    if is_async(handler):
        return _prepare_async(cast("AsyncHandler", handler), terms)
    return _prepare_sync(cast("SyncHandler", handler), terms)


def _prepare_async(handler: AsyncHandler, terms: Terms) -> AsyncHandler:
    call, arguments = cast("Callable[..., Any]", handler), terms.arguments.of
    seconds = None if terms.time_limit is None else terms.time_limit.total_seconds()

    @functools.wraps(handler)
    async def prepared(session: "AsyncSession", message: Message) -> Any:
        message = terms.upcast(message)
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                result = await call(*arguments(session, message))
        except (Exception, asyncio.CancelledError) as error:
            # In Python 3.11, a limit ends with CancelledError after a failed TaskGroup.
            is_timeout = isinstance(error, TimeoutError | asyncio.CancelledError)
            if is_timeout and limit.expired() and terms.time_limit is not None:
                raise HandlerTimeoutError(name_of(handler), terms.time_limit) from error
            if isinstance(error, Exception):
                terms.classify(error)
            raise
        refuse_unrun(handler, result)
        return result

    return prepared


def _prepare_sync(handler: SyncHandler, terms: Terms) -> SyncHandler:
    call, arguments = cast("Callable[..., Any]", handler), terms.arguments.of

    @functools.wraps(handler)
    def prepared(session: Session, message: Message) -> Any:
        message = terms.upcast(message)
        started = time.monotonic()
        try:
            result = call(*arguments(session, message))
        except Exception as error:
            terms.classify(error)
            raise
        refuse_unrun(handler, result)
        terms.check_time(handler, time.monotonic() - started)
        return result

    return prepared
