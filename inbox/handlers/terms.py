"""How a handler is called: its `Terms`, and what becomes of the errors that it raises.

`prepare` wraps a handler in its terms: the version that it understands, its time limit,
and which of its failures are permanent.
"""

import asyncio
import concurrent.futures
import contextvars
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

import psycopg
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from inbox.errors import (
    ConnectionLostError,
    DeadLetter,
    HandlerTimeoutError,
    RetryLater,
    SpecialError,
)
from inbox.handlers.arguments import AS_THEY_ARE, Arguments
from inbox.handlers.routes import AsyncHandler, Handler, SyncHandler, name_of
from inbox.handlers.signature import is_async, refuse_unrun
from outbox.duration import check_duration, exact_duration
from outbox.errors import ConfigError, check_type, one_line, shorten, sqlstate_of
from outbox.message import Message
from outbox.retry import RetryPolicy

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession


T = TypeVar("T")

_IDLE_IN_TRANSACTION: Final = "25P03"  # idle for longer than max_idle


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
        SpecialError: the handler raised SystemExit, StopIteration, a `CancelledError`
            of its own or another `BaseException`.
    """

    __slots__ = ("_caller",)

    def __init__(self) -> None:
        """Remember the task that waits for the handler; in a thread there is none."""
        try:
            self._caller = asyncio.current_task()
        except RuntimeError:
            self._caller = None  # no event loop runs here

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        """Raise an ordinary error instead of a special one."""
        if error is None or (
            isinstance(error, Exception) and not isinstance(error, _SPECIAL)
        ):
            return
        if self._caller is not None and (
            isinstance(error, KeyboardInterrupt)  # it can be a signal's
            or (isinstance(error, asyncio.CancelledError) and self._caller.cancelling())
        ):
            return
        raise SpecialError(f"the handler raised {one_line(error)}") from error


def call_alone(function: Callable[..., T], *arguments: Any) -> T:
    """Call a plain function of the user outside an attempt, in a context of its own.

    Raises:
        Exception: as `as_failure`.
    """
    with as_failure():
        return contextvars.copy_context().run(function, *arguments)


# A future refuses the first, and takes the second for its own cancellation.
_SPECIAL: Final = (StopIteration, concurrent.futures.CancelledError)


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
