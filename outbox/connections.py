"""Add messages on a connection instead of a session: SQLAlchemy Core's, or psycopg's.

There is no unit of work, so the rows are inserted at once. Like `session.py`, nothing
here imports a driver: what isn't imported has no objects.
"""

from collections.abc import Coroutine, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql

from pillarbox.outbox.errors import AutocommitError
from pillarbox.outbox.message import Message
from pillarbox.outbox.schema import arrays_of, insert_many, insert_of
from pillarbox.outbox.session import is_instance

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy.ext.asyncio import AsyncConnection

SyncConnection: TypeAlias = "Connection | psycopg.Connection[Any]"
AsyncConnectionOf: TypeAlias = "AsyncConnection | psycopg.AsyncConnection[Any]"


def is_connection(target: object) -> bool:
    """Return whether messages can be added on it here."""
    return isinstance(target, Connection) or is_async(target) or is_psycopg(target)


def insert_on(
    target: Any, messages: Sequence[Message]
) -> Coroutine[Any, Any, None] | None:
    """Insert messages in a connection's transaction.

    Returns:
        None, or what to await if the connection is async.

    Raises:
        AutocommitError: the connection commits each statement separately.
        Exception: what the driver raised.
    """
    is_raw = is_psycopg(target)
    if is_raw:
        refuse_raw_autocommit(target, "the messages")
    if is_async(target) or is_instance(target, "psycopg", "AsyncConnection"):
        return _insert_async(target, messages)
    if messages:
        target.execute(*_insert(target, messages))
    return None


async def _insert_async(target: Any, messages: Sequence[Message]) -> None:
    if messages:
        await target.execute(*_insert(target, messages))


def _insert(target: Any, messages: Sequence[Message]) -> tuple[Any, ...]:
    if is_psycopg(target):
        return _statement(), arrays_of(messages)
    return (insert_of(messages),)


def is_async(target: object) -> bool:
    """Return whether it is an `AsyncConnection` of SQLAlchemy."""
    return is_instance(target, "sqlalchemy.ext.asyncio", "AsyncConnection")


def is_psycopg(target: object) -> bool:
    """Return whether it is a connection of psycopg."""
    return is_instance(target, "psycopg", "BaseConnection")


def refuse_raw_autocommit(target: Any, subject: str) -> None:
    """Reject a connection of psycopg on which each statement is a transaction.

    Args:
        subject: what would survive a rollback there, for the error message.

    Raises:
        AutocommitError: it is in autocommit mode, outside of a block.
    """
    # In the block of its transaction(), autocommit doesn't apply.
    if target.autocommit and target.info.transaction_status.name == "IDLE":
        raise AutocommitError(
            "the connection is in autocommit mode, where a rollback would keep "
            f"{subject}; use a block of connection.transaction(), or set "
            "autocommit=False"
        )


@cache
def _statement() -> bytes:
    compiled = insert_many().compile(dialect=postgresql.psycopg.dialect())  # type: ignore[no-untyped-call]
    return str(compiled).encode()
