"""How a handler is called: its `Terms`, and how its errors are treated.

The terms are the version that a handler understands, its time limit, and which of its
failures are permanent.
"""

import asyncio
import concurrent.futures
import contextvars
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeAlias, TypeVar

from pillarbox.inbox.errors import HandlerTimeoutError, SpecialError
from pillarbox.inbox.handlers.arguments import AS_THEY_ARE, Arguments
from pillarbox.inbox.handlers.routes import name_of
from pillarbox.outbox.duration import check_duration, exact_duration
from pillarbox.outbox.errors import ConfigError, check_type, one_line, shorten
from pillarbox.outbox.message import Message
from pillarbox.outbox.retry import RetryPolicy

T = TypeVar("T")


class as_failure:  # noqa: N801 (reads as a statement: with as_failure(): …)
    """Make whatever a handler raises in the block an `Exception`: its attempt failed.

    Anything else would end the event loop, or get lost in a future. In a task, a
    cancellation of its caller and KeyboardInterrupt pass.

    Raises:
        SpecialError: the handler raised SystemExit, StopIteration, a `CancelledError`
            of its own or another `BaseException`; an `ExceptionGroup` of such errors if
            it raised a group.
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
        if error is None or (failure := _failure_of(error)) is error:
            return
        if self._caller is not None and isinstance(error, KeyboardInterrupt):
            return  # it can be a signal's
        if self._caller is not None and self._caller.cancelling():
            if isinstance(error, asyncio.CancelledError):
                return
            if isinstance(error, BaseExceptionGroup) and error.subgroup(
                asyncio.CancelledError
            ):
                raise asyncio.CancelledError from error
        raise failure from error


def _failure_of(error: BaseException) -> Exception:
    """Return an error as an ordinary one; of a group, its special parts."""
    if isinstance(error, Exception) and not isinstance(error, _SPECIAL):
        return error
    if isinstance(error, BaseExceptionGroup):
        parts = [_failure_of(part) for part in error.exceptions]
        # A reason says where it was raised.
        return ExceptionGroup(error.message, parts).with_traceback(error.__traceback__)
    failure = SpecialError(f"the handler raised {one_line(error)}")
    failure.__cause__ = error
    return failure


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


def unchanged(message: Message) -> Message:
    """Return a message as it is."""
    return message


@dataclass(frozen=True, slots=True)
class Terms:
    """How a handler is called.

    Attributes:
        upcast: upcasts a message to the version that the handler understands.
        time_limit: after this time the handler's work is rolled back, and the attempt
            fails. A plain function, or a coroutine that swallows its cancellation,
            can't be stopped: it keeps its slot until it returns.
        permanent: the exceptions that no retry would fix.
        retry: the number of attempts and the backoff; None: the consumer's.
        arguments: what the handler takes, in its order.
    """

    upcast: Callable[[Message], Message] = unchanged
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

    def is_permanent(self, error: Exception) -> bool:
        """Return whether no retry would fix a failure."""
        if isinstance(self.permanent, type | tuple):
            return isinstance(error, self.permanent)
        return call_alone(self.permanent, error)

    @contextmanager
    def timed(self, handler: Callable[..., Any]) -> Iterator[None]:
        """Let a call of the handler, which the block makes, fail after its time limit.

        Raises:
            HandlerTimeoutError: it took longer, whatever it did or raised at its end.
        """
        started = time.monotonic()
        try:
            yield
        except (Exception, asyncio.CancelledError, BaseExceptionGroup) as error:
            self._check_time(handler, started, error)
            raise
        self._check_time(handler, started)

    def _check_time(
        self,
        handler: Callable[..., Any],
        started: float,
        error: BaseException | None = None,
    ) -> None:
        limit = self.time_limit
        if limit is not None and time.monotonic() - started > limit.total_seconds():
            raise HandlerTimeoutError(name_of(handler), limit) from error
