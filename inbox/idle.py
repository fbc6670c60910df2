"""How long a transaction that holds a receipt can be idle.

A consumer that is frozen, or whose host is gone, leaves its receipts uncommitted, and
the process that took over waits for them at the unique index. So the statement that
inserts a receipt also sets a time limit after which the server ends the session: the
process that took over proceeds, and the late process has no transaction left to commit.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

from sqlalchemy import (
    ColumnElement,
    Text,
    bindparam,
    cast,
    func,
    literal_column,
    select,
)
from sqlalchemy.orm import Session

from pillarbox.inbox.connection import connection_of
from pillarbox.inbox.errors import HandlerTimeoutError, IdleTimeoutError
from pillarbox.inbox.handlers.outcome import Failed
from pillarbox.inbox.verdict import WAS_IDLE, Lost, judge
from pillarbox.outbox.duration import check_duration, exact_duration
from pillarbox.outbox.errors import ConfigError, sqlstate_of
from pillarbox.outbox.session import AnySession

DEFAULT_MAX_IDLE: Final = timedelta(seconds=60)
_LEAST: Final = timedelta(seconds=1)
_MOST: Final = timedelta(days=24)  # PostgreSQL counts milliseconds in 32 bits
_MAX_IDLE: Final = "inbox.max_idle"
_SHUTDOWN: Final = "57P0"

_SETTING: Final[ColumnElement[str]] = literal_column(
    "'idle_in_transaction_session_timeout'"
)
LIMITS_IDLE: Final[ColumnElement[bool]] = func.set_config(
    _SETTING,
    func.coalesce(
        cast(bindparam("max_idle", type_=Text()), Text), func.current_setting(_SETTING)
    ),
    literal_column("true"),
).is_not(None)
"""A condition that is always true; it limits the idle time of the transaction to
`max_idle` if that isn't null."""


def check_max_idle(max_idle: timedelta | None) -> None:
    """Refuse a limit that PostgreSQL doesn't accept or that no handler could meet.

    Raises:
        ConfigError: it is below a second or above 24 days, or isn't a duration.
    """
    if max_idle is None:
        return
    check_duration("max_idle", max_idle)
    if not _LEAST <= max_idle <= _MOST:
        raise ConfigError(
            f"max_idle={exact_duration(max_idle)}: must be from 1s to 24d, or None"
        )


def limit_idle(session: AnySession, max_idle: timedelta | None) -> None:
    """Set how long a session can be idle in a transaction that holds a receipt."""
    if max_idle is not None:
        session.info[_MAX_IDLE] = as_setting(max_idle)


def as_setting(max_idle: timedelta | None) -> str | None:
    """Return a limit as PostgreSQL writes it."""
    return None if max_idle is None else f"{max_idle // timedelta(milliseconds=1)}ms"


def max_idle_of(session: AnySession) -> str | None:
    """Return the session's limit, as PostgreSQL writes it; None if it has none."""
    limit: str | None = session.info.get(_MAX_IDLE)
    return limit


def limit_idle_now(session: Session) -> None:
    """Apply that limit to the current transaction, if no receipt applies it."""
    max_idle = max_idle_of(session)
    if max_idle is not None:
        connection_of(session).execute(select(LIMITS_IDLE), {"max_idle": max_idle})


class _Own:
    """The block of the handler itself."""

    error: Exception | None = None

    def __enter__(self) -> None:
        """Begin it."""

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Remember what it raised."""
        if isinstance(error, Exception):
            self.error = error


def decides(error: Exception) -> bool:
    """Return whether what a handler raised counts, though its connection is lost."""
    return isinstance(error, HandlerTimeoutError) or not isinstance(
        judge(error), Failed | Lost
    )


@contextmanager
def limiting(max_idle: timedelta | None) -> Iterator[_Own]:
    """Run a transaction; yield the block for its handler, whose decision comes first.

    The rollback of a lost connection raises, too. asyncpg drops the server's reason. So
    if there is none, and the block took longer than the limit, the limit is taken for
    the reason.

    Raises:
        IdleTimeoutError: the connection was lost because the transaction was idle: the
            handler's fault, and no outage.
    """
    started, own = time.monotonic(), _Own()
    try:
        yield own
    except Exception as error:  # noqa: BLE001 (raised below)
        raised = error
    else:
        return
    if own.error is not None and (
        decides(own.error) or not isinstance(judge(raised), Lost)
    ):
        raised = own.error
    if isinstance(verdict := judge(raised), Lost):
        state = sqlstate_of(verdict.lost) or ""
        seconds = time.monotonic() - started
        is_over = max_idle is not None and seconds > max_idle.total_seconds()
        if state == WAS_IDLE or (is_over and not state.startswith(_SHUTDOWN)):
            raise IdleTimeoutError(max_idle, seconds, verdict.lost) from raised
    # Outside of the block, since the rollback's error may have this one as its context.
    raise raised
