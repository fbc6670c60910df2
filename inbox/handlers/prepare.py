"""A handler as a consumer calls it: with its version, its time limit, its failures.

Whoever calls what `prepare` gives needs to know nothing of these: it has the shape of
a handler, and what it raises says what is to happen.
"""

import asyncio
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from sqlalchemy.orm import Session

from inbox.errors import DeadLetter, HandlerTimeoutError, RetryLater
from inbox.handlers.executor import connection_broke
from inbox.handlers.routes import AsyncHandler, Handler, SyncHandler, name_of
from inbox.handlers.signature import is_async, refuse_awaitable
from outbox.errors import ConfigError, one_line, shorten
from outbox.message import Message
from outbox.retry import RetryPolicy

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

Permanent: TypeAlias = (
    type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], bool]
)


@dataclass(frozen=True, slots=True)
class Terms:
    """How a handler is called.

    Attributes:
        lift: makes a message one that the handler understands.
        time_limit: after which its work is rolled back and counted as a failure. A
            plain function can't be stopped: it keeps its place in flight until it
            returns.
        permanent: of the exceptions that it raises, those that no retry would fix.
        retry: backoff and number of attempts; the consumer's if None.
    """

    lift: Callable[[Message], Message]
    time_limit: timedelta | None = None
    permanent: Permanent = ()
    retry: RetryPolicy | None = None

    def __post_init__(self) -> None:
        """Refuse what can't be used."""
        if self.time_limit is not None and self.time_limit <= timedelta(0):
            raise ConfigError(f"time_limit={self.time_limit}: must be positive")
        kinds: tuple[object, ...] = (
            self.permanent if isinstance(self.permanent, tuple) else ()
        )
        for kind in kinds:
            if not isinstance(kind, type) or not issubclass(kind, Exception):
                raise ConfigError(
                    f"permanent {shorten(kind)}: isn't a kind of exception; pass "
                    "classes, or a function that tells"
                )

    def judge(self, error: Exception) -> None:
        """Raise `DeadLetter` for an error that no retry would fix.

        Decisions and lost connections are left alone, whatever `permanent` says.
        """
        if isinstance(error, RetryLater | DeadLetter) or connection_broke(error):
            return
        if isinstance(self.permanent, type | tuple):
            is_permanent = isinstance(error, self.permanent)
        else:
            is_permanent = self.permanent(error)
        if is_permanent:
            raise DeadLetter(one_line(error)) from error

    def check_time(self, handler: Handler, seconds: float) -> None:
        """Raise `HandlerTimeoutError` if a handler took longer than it may."""
        limit = self.time_limit
        if limit is not None and seconds > limit.total_seconds():
            raise HandlerTimeoutError(name_of(handler), limit)


def prepare(handler: Handler, terms: Terms) -> Handler:
    """Give a handler of the same colour that keeps to the terms."""
    if is_async(handler):
        return _prepare_async(cast("AsyncHandler", handler), terms)
    return _prepare_sync(cast("SyncHandler", handler), terms)


def _prepare_async(handler: AsyncHandler, terms: Terms) -> AsyncHandler:
    seconds = None if terms.time_limit is None else terms.time_limit.total_seconds()

    @functools.wraps(handler)
    async def prepared(session: "AsyncSession", message: Message) -> Any:
        message = terms.lift(message)
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await handler(session, message)
        except TimeoutError as error:
            if limit.expired() and terms.time_limit is not None:
                raise HandlerTimeoutError(name_of(handler), terms.time_limit) from error
            terms.judge(error)
            raise
        except Exception as error:
            terms.judge(error)
            raise

    return prepared


def _prepare_sync(handler: SyncHandler, terms: Terms) -> SyncHandler:
    @functools.wraps(handler)
    def prepared(session: Session, message: Message) -> Any:
        message = terms.lift(message)
        started = time.monotonic()
        try:
            result = handler(session, message)
        except Exception as error:
            terms.judge(error)
            raise
        refuse_awaitable(handler, result)
        terms.check_time(handler, time.monotonic() - started)
        return result

    return prepared
