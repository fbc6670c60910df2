"""Cancel scheduled messages in the caller's own transaction.

`outbox.cancel()` in SQL decides, and so can be called in any language. A message can be
cancelled until it is due. A reader that finds it due first asks whether a transaction
is open that may cancel it; see `docs/explanation/positions.md`.
"""

import json
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias, overload
from uuid import UUID

from sqlalchemy import Connection, text
from sqlalchemy.orm import Session, scoped_session

from pillarbox.outbox.connections import (
    AsyncConnectionOf,
    SyncConnection,
    is_async,
    is_connection,
    is_psycopg,
    refuse_raw_autocommit,
)
from pillarbox.outbox.errors import ConfigError, InvalidMessageError, shorten
from pillarbox.outbox.session import (
    is_async_scoped_session,
    is_async_session,
    is_instance,
    is_sharded_session,
)
from pillarbox.outbox.writer import connection_of, flush_messages, sync_session

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

_SUBJECT: Final = "the cancellation"
_STATEMENT: Final = "SELECT outcome, CAST(readers AS text) FROM outbox.cancel({})"
_CORE: Final = text(_STATEMENT.format("CAST(:id AS uuid), CAST(:reason AS text)"))
_RAW: Final = _STATEMENT.format("%s::uuid, %s::text").encode()


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The message is cancelled when the transaction commits, or already was."""


@dataclass(frozen=True, slots=True)
class TooLate:
    """The message is due, or was not scheduled.

    Attributes:
        readers: its state for each reader, as in `outbox.message_status`. `ready` means
            that a process may be publishing or handling it.
    """

    readers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UnknownMessage:
    """There is no message with this id, or its day was dropped."""


Cancellation: TypeAlias = Cancelled | TooLate | UnknownMessage


@overload
def cancel(
    session: "SyncConnection | Session | scoped_session[Any]",
    message_id: UUID,
    *,
    reason: str | None = None,
) -> Cancellation: ...


@overload
def cancel(
    session: "AsyncConnectionOf | AsyncSession | async_scoped_session[Any]",
    message_id: UUID,
    *,
    reason: str | None = None,
) -> Coroutine[Any, Any, Cancellation]: ...


def cancel(session: Any, message_id: UUID, *, reason: str | None = None) -> Any:
    """Cancel a scheduled message in the transaction of `session`.

    A rollback undoes it. While the transaction is open, no reader gets the message,
    even if it becomes due. Returns `Cancelled`, which holds for all present and future
    readers, `TooLate` if the message is due, or `UnknownMessage`.

    Args:
        session: as for `add`; messages that were added to it are flushed first. With an
            async one, await the call.
        message_id: the message's `id`.
        reason: why; it is stored.

    Raises:
        InvalidMessageError: `message_id` isn't a `UUID`.
        NotASessionError: `session` isn't one.
        ConfigError: it is a `ShardedSession`, or has no bind for the messages.
        AutocommitError: its connection is in AUTOCOMMIT mode.
    """
    if not isinstance(message_id, UUID):
        raise InvalidMessageError(
            "message_id", message_id, "isn't a UUID", "pass message.id"
        )
    values = {"id": message_id, "reason": reason}
    if is_connection(session):
        if is_psycopg(session):
            refuse_raw_autocommit(session, _SUBJECT)
            return _cancel_raw(session, values)
        return (
            session.run_sync(_run, values)
            if is_async(session)
            else _run(session, values)
        )
    target = sync_session(session)
    if is_sharded_session(target):
        raise ConfigError(
            f"session {shorten(target)}: is a ShardedSession, but a message has no "
            "shard; pass the connection of its shard"
        )
    if is_async_scoped_session(session):
        session = session()
    if is_async_session(session):
        return session.run_sync(_cancel, values)
    return _cancel(target, values)


def _cancel(session: Session, values: Mapping[str, object]) -> Cancellation:
    flush_messages(session)
    return _run(connection_of(session, _SUBJECT), values)


def _run(connection: Connection, values: Mapping[str, object]) -> Cancellation:
    return _read(*connection.execute(_CORE, values).one())


def _cancel_raw(
    connection: Any, values: Mapping[str, object]
) -> Cancellation | Coroutine[Any, Any, Cancellation]:
    from psycopg.rows import tuple_row

    cursor = connection.cursor(row_factory=tuple_row)
    parameters = tuple(values.values())
    if is_instance(connection, "psycopg", "AsyncConnection"):
        return _fetch(cursor, parameters)
    return _read(*cursor.execute(_RAW, parameters).fetchone())


async def _fetch(cursor: Any, parameters: tuple[object, ...]) -> Cancellation:
    return _read(*await (await cursor.execute(_RAW, parameters)).fetchone())


def _read(outcome: str, readers: str | None) -> Cancellation:
    match outcome:
        case "cancelled" | "already cancelled":
            return Cancelled()
        case "too late":
            return TooLate(json.loads(readers or "{}"))
    return UnknownMessage()
