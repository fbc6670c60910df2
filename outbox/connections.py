"""Add messages on a connection instead of a session: SQLAlchemy Core's, or psycopg's.

There is no unit of work, so the rows are inserted at once. Like `session.py`, nothing
here imports a driver: what isn't imported has no objects.
"""

from collections.abc import Coroutine, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql

from outbox.errors import AutocommitError
from outbox.message import Message
from outbox.schema import arrays_of, insert_many, insert_of
from outbox.session import is_instance

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy.ext.asyncio import AsyncConnection

SyncConnection: TypeAlias = "Connection | psycopg.Connection[Any]"
AsyncConnectionOf: TypeAlias = "AsyncConnection | psycopg.AsyncConnection[Any]"


def is_connection(target: object) -> bool:
    """Return whether messages can be added on it here."""
    return isinstance(target, Connection) or _is_async(target) or _is_psycopg(target)


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
    is_raw = _is_psycopg(target)
    if is_raw:
        _refuse_autocommit(target)
    if _is_async(target) or is_instance(target, "psycopg", "AsyncConnection"):
        return _insert_async(target, messages)
    if messages:
        target.execute(*_insert(target, messages))
    return None


async def _insert_async(target: Any, messages: Sequence[Message]) -> None:
    if messages:
        await target.execute(*_insert(target, messages))


def _insert(target: Any, messages: Sequence[Message]) -> tuple[Any, ...]:
    if _is_psycopg(target):
        return _statement(), arrays_of(messages)
    return (insert_of(messages),)


def _is_async(target: object) -> bool:
    return is_instance(target, "sqlalchemy.ext.asyncio", "AsyncConnection")


def _is_psycopg(target: object) -> bool:
    return is_instance(target, "psycopg", "BaseConnection")


def _refuse_autocommit(target: Any) -> None:
    # In the block of its transaction(), autocommit doesn't apply.
    if target.autocommit and target.info.transaction_status.name == "IDLE":
        raise AutocommitError(
            "the connection is in autocommit mode, where a rollback would keep the "
            "messages; add them in a block of connection.transaction(), or set "
            "autocommit=False"
        )


@cache
def _statement() -> bytes:
    compiled = insert_many().compile(dialect=postgresql.psycopg.dialect())  # type: ignore[no-untyped-call]
    return str(compiled).encode()
