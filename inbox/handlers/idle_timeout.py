"""How long a transaction that holds a receipt may stand still.

A consumer that is frozen, or whose host is gone, leaves its receipts uncommitted, and
whoever took over waits for them at the unique index. So the statement that inserts a
receipt also tells the server when to end the session: then the one that took over goes
on, and the late one has no transaction left to commit.
"""

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

from outbox.errors import ConfigError
from outbox.session import AnySession

DEFAULT_MAX_IDLE: Final = timedelta(seconds=60)
_LEAST: Final = timedelta(seconds=1)
_MOST: Final = timedelta(days=24)  # PostgreSQL counts milliseconds in 32 bits
_NOTED: Final = "inbox.max_idle"

LIMITS_IDLE: Final[ColumnElement[bool]] = func.set_config(
    literal_column("'idle_in_transaction_session_timeout'"),
    cast(bindparam("max_idle", type_=Text()), Text),
    literal_column("true"),
).is_not(None)
"""A condition that is always true, and limits the transaction by `max_idle`."""
_LIMIT_NOW: Final = select(LIMITS_IDLE)


def check_max_idle(max_idle: timedelta | None) -> None:
    """Refuse what PostgreSQL can't count, and what no handler can keep to.

    Raises:
        ConfigError: it is below a second or above 24 days.
    """
    if max_idle is not None and not _LEAST <= max_idle <= _MOST:
        raise ConfigError(
            f"max_idle={max_idle}: must be from a second to 24 days, or None"
        )


def limit_idle(session: AnySession, max_idle: timedelta | None) -> None:
    """Note for the receipts of a session how long it may stand still after them."""
    if max_idle is not None:
        session.info[_NOTED] = f"{max_idle // timedelta(milliseconds=1)}ms"


def limit_idle_now(session: Session) -> None:
    """Limit the running transaction by what was noted, where no receipt does it."""
    max_idle = max_idle_of(session)
    if max_idle is not None:
        session.execute(_LIMIT_NOW, {"max_idle": max_idle})


def max_idle_of(session: AnySession) -> str | None:
    """Give what was noted, as PostgreSQL reads it; None if nothing was."""
    noted: str | None = session.info.get(_NOTED)
    return noted
