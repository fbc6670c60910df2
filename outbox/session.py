"""SQLAlchemy's sync and async sessions, and the mode that their connections need.

Many applications use only one of the two kinds.

`sqlalchemy.ext.asyncio` needs greenlet, which SQLAlchemy doesn't install by default and
an application with plain sessions doesn't need. So nothing here imports that module: if
no other code has imported it, there are no objects of its classes either.
"""

import re
import sys
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sqlalchemy import Connection, Engine, ExceptionContext, event
from sqlalchemy.orm import Session, scoped_session

from pillarbox.outbox.errors import (
    AutocommitError,
    MissingPartitionError,
    NotMigratedError,
    message_of,
    sqlstate_of,
)

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import (
        AsyncSession,
        async_scoped_session,
        async_sessionmaker,
    )
    from typing_extensions import TypeIs

AnySession: TypeAlias = (
    "Session | scoped_session[Any] | AsyncSession | async_scoped_session[Any]"
)

_MODULE: Final = "sqlalchemy.ext.asyncio"
_CHECK_VIOLATION: Final = "23514"
_UNDEFINED: Final = ("42P01", "3F000", "42883")
_OURS: Final = re.compile(r"\b(out|in)box\b")
_NO_PARTITION: Final = ["outbox", "message", None]
"""Unlike a CHECK that fails, it names no constraint."""


def is_instance(value: object, module: str, name: str) -> bool:
    """Return whether a value is of a class of a module, which may not be imported."""
    found = sys.modules.get(module)
    return found is not None and isinstance(value, getattr(found, name))


def is_async_session(value: object) -> "TypeIs[AsyncSession]":
    """Return whether a value is an `AsyncSession`."""
    return is_instance(value, _MODULE, "AsyncSession")


def is_async_scoped_session(value: object) -> "TypeIs[async_scoped_session[Any]]":
    """Return whether a value is an `async_scoped_session`, a proxy for a session."""
    return is_instance(value, _MODULE, "async_scoped_session")


def is_async_sessionmaker(value: object) -> "TypeIs[async_sessionmaker[AsyncSession]]":
    """Return whether a value is an `async_sessionmaker`."""
    return is_instance(value, _MODULE, "async_sessionmaker")


def is_sharded_session(session: Session) -> bool:
    """Return whether a session chooses a database for each object."""
    return is_instance(session, "sqlalchemy.ext.horizontal_shard", "ShardedSession")


def async_session_of(session: Session) -> "AsyncSession | None":
    """Return the `AsyncSession` that wraps a session, if there is one."""
    found = sys.modules.get(_MODULE)
    return None if found is None else found.async_session(session)


def refuse_autocommit(connection: Connection, subject: str) -> None:
    """Reject a connection on which each statement is a transaction of its own.

    Asks only the driver, so it sends nothing to the server and never waits for it.

    Args:
        subject: what would survive a rollback there, for the error message.

    Raises:
        AutocommitError: it is in AUTOCOMMIT mode, whatever set it.
    """
    # A lost connection raises its own error at the next statement.
    if connection.closed or connection.invalidated:
        return
    if not getattr(connection.connection.dbapi_connection, "autocommit", False):
        return
    raise AutocommitError(
        "the session's connection is in AUTOCOMMIT mode (set by create_engine("
        'isolation_level="AUTOCOMMIT"), execution_options(isolation_level='
        '"AUTOCOMMIT") or autocommit=True in connect_args), where a rollback keeps '
        f"{subject}; remove that setting, or use a session of "
        'engine.execution_options(isolation_level="READ COMMITTED")'
    )


@event.listens_for(Engine, "handle_error")
def _explain(context: ExceptionContext) -> None:
    """Name the remedy where our tables or the partition for now are missing."""
    error = context.original_exception
    state = sqlstate_of(error)
    if state in _UNDEFINED and _OURS.search(said := message_of(error)):
        raise NotMigratedError(
            f"{said}: this database lacks pillarbox's tables, or some of them; run "
            "pillarbox migrate for it, or connect to the one that has them"
        )
    if state != _CHECK_VIOLATION:
        return
    # asyncpg's error is the cause of SQLAlchemy's.
    details = getattr(error, "diag", None) or error.__cause__
    names = ("schema_name", "table_name", "constraint_name")
    if [getattr(details, name, None) for name in names] == _NO_PARTITION:
        raise MissingPartitionError(
            "the outbox has no partition for now, so the transaction was rolled back;"
            " run pillarbox maintain now and every hour, and look for the cause with"
            " pillarbox doctor"
        )
