"""What an error means for its message, the same for every kind of handler.

Consumers, jobs, webhooks and retries of dead letters ask `judge`. The error can be a
group, as a `TaskGroup` raises it. Of several parts, the first in this list decides:

    TransactionEndedError, its effects may be committed  ──▶ Unclear
    DeadLetter, or InvalidReceiptError                   ──▶ Fatal
    RetryLater; of several, the longest delay            ──▶ Later
    DatabaseUnavailableError                             ──▶ Outage
    a lost connection, also behind a cause or context    ──▶ Lost
    anything else; Fatal if it is permanent              ──▶ Failed

A decision that the handler caught and replaced by another error doesn't count: `raise
OrderError from RetryLater(…)` has failed. A lost connection stays one, whatever the
handler makes of it: nothing can be committed any more.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeAlias

import psycopg
from sqlalchemy.exc import DBAPIError

from pillarbox.inbox.errors import (
    ConnectionLostError,
    DeadLetter,
    HandlerTimeoutError,
    IdleTimeoutError,
    InvalidReceiptError,
    RetryLater,
    TransactionEndedError,
)
from pillarbox.inbox.handlers.outcome import Failed, Later, Outage
from pillarbox.outbox.errors import (
    DatabaseUnavailableError,
    leaves_of,
    one_line,
    sqlstate_of,
    without_values,
)


@dataclass(frozen=True, slots=True)
class Unclear:
    """The handler ended its transaction: look for the receipt."""

    error: TransactionEndedError


@dataclass(frozen=True, slots=True)
class Fatal:
    """No retry would help."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Lost:
    """A connection was lost; `error` is what was raised because of `lost`."""

    error: Exception
    lost: Exception


Verdict: TypeAlias = Unclear | Fatal | Later | Outage | Lost | Failed

_ORDER: Final = (Unclear, Fatal, Later, Outage, Lost, Failed)
WAS_IDLE: Final = "25P03"
# A handler that took too long can lose its connection, which is no outage.
_OVERTIME: Final = (HandlerTimeoutError, IdleTimeoutError)


def judge(
    error: Exception, is_permanent: Callable[[Exception], bool] = lambda _: False
) -> Verdict:
    """Return what an error means.

    Args:
        is_permanent: recognizes failures that no retry would fix; it is asked about the
            error and each of its parts, but not if one of them decides.
    """
    leaves = [leaf for leaf in leaves_of(error) if isinstance(leaf, Exception)]
    parts = leaves if leaves[0] is error else [error, *leaves]
    decided = min(map(_judge_alone, parts), key=_rank)
    is_mixed = len(leaves) > 1
    match decided:
        case Fatal() if is_mixed:
            return Fatal(error)
        case Later(delay) if is_mixed:
            return Later(delay, one_line(error))
        case Lost(_, lost):
            return Lost(error, lost)
        case Failed():
            return _judge_failure(error, parts, is_permanent)
    return decided


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
    return is_lost or state[:2] == "08" or state[:4] == "57P0" or state == WAS_IDLE


def _judge_alone(error: Exception) -> Verdict:
    match error:
        case TransactionEndedError():
            return Unclear(error)
        case DeadLetter() | InvalidReceiptError():
            return Fatal(error)
        case RetryLater():
            return Later(error.delay, without_values(error.reason, error))
        case DatabaseUnavailableError():
            return Outage(error)
    lost = next(filter(connection_broke, _behind(error)), None)
    return Failed(error) if lost is None else Lost(error, lost)


def _judge_failure(
    error: Exception,
    parts: list[Exception],
    is_permanent: Callable[[Exception], bool],
) -> Verdict:
    try:
        if not any(map(is_permanent, parts)):
            return Failed(error)
    except Exception as broken:  # noqa: BLE001 (`permanent` is the user's)
        return Failed(broken)
    decision = DeadLetter(one_line(error))
    decision.__cause__ = error
    return Fatal(decision)


def _rank(verdict: Verdict) -> tuple[int, timedelta]:
    delay = verdict.delay if isinstance(verdict, Later) else timedelta(0)
    return _ORDER.index(type(verdict)), -delay


def _behind(error: BaseException) -> Iterator[Exception]:
    """Yield an error, its causes and contexts, and their members."""
    found, seen = [error], set[int]()
    while found:
        known = found.pop()
        if id(known) in seen or isinstance(known, _OVERTIME):
            continue
        seen.add(id(known))
        if isinstance(known, Exception):
            yield known
        members = known.exceptions if isinstance(known, BaseExceptionGroup) else ()
        behind = (*members, known.__context__, known.__cause__)
        found += [it for it in behind if it is not None]
