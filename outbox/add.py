"""Add messages to the caller's own transaction.

The rows wait in the session as pending objects, so a rolled-back savepoint takes
its messages with it. When the session flushes, all of them leave in one statement:
a flush of its own for each would cost a trigger and a round trip apiece.
"""

import json
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from sqlalchemy import (
    ARRAY,
    DateTime,
    Insert,
    Integer,
    LargeBinary,
    SmallInteger,
    Text,
    bindparam,
    cast,
    event,
    func,
    insert,
    select,
)
from sqlalchemy.dialects.postgresql import JSONB, UUID
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, registry, scoped_session
from sqlalchemy.orm.session import UOWTransaction

from outbox.errors import InvalidMessageError, NotASessionError, shorten
from outbox.lane import lane_of
from outbox.limits import Limits
from outbox.message import Message
from outbox.schema import metadata, message_table

AnySession: TypeAlias = (
    Session | AsyncSession | scoped_session[Any] | async_scoped_session[Any]
)

_LIMITS: Final = Limits()
_WAITING: Final = "outbox.messages_waiting"

_COLUMNS: Final[dict[str, Any]] = {
    "id": UUID(as_uuid=True),
    "lane": SmallInteger(),
    "schema_version": Integer(),
    "available_at": DateTime(timezone=True),
    "topic": Text(),
    "key": Text(),
    "tenant": Text(),
    "content_type": Text(),
    "headers": Text(),
    "payload": LargeBinary(),
}


class AddedMessage:
    """A message that waits in a session for the next flush."""

    def __init__(self, message: Message) -> None:
        """Hold the message; its columns are filled by the statement."""
        self.message = message


registry(metadata=metadata).map_imperatively(AddedMessage, message_table)


def add(session: AnySession, *messages: Message, limits: Limits = _LIMITS) -> None:
    """Add messages to the transaction of `session`.

    They are published if and only if that transaction commits. No I/O happens
    here, so there is nothing to await: the rows leave with the next flush, at the
    latest with the commit. With `Session(binds=…)`, bind `outbox.schema.metadata`'s
    tables too. As thread-safe as the session, that is, not at all.

    Raises:
        InvalidMessageError: a message breaks a rule; none of the call was added,
            and the session is as it was.
        NotASessionError: `session` isn't one.
    """
    target = _sync_session(session)
    _check(messages, limits)
    if messages:
        target.info[_WAITING] = True
        target.add_all(AddedMessage(message) for message in messages)


def insert_statement(*messages: Message, limits: Limits = _LIMITS) -> Insert:
    """Build one INSERT of all messages, to execute on a connection of your own.

    The statement's text is the same for any number of messages.

    Raises:
        InvalidMessageError: a message breaks a rule, or there is none.
    """
    if not messages:
        raise InvalidMessageError("messages", (), "is empty", "pass at least one")
    _check(messages, limits)
    return _insert(messages)


def _check(messages: Sequence[Message], limits: Limits) -> None:
    for message in messages:
        if not isinstance(message, Message):
            raise InvalidMessageError(
                "object",
                type(message),
                "isn't a Message",
                "pass outbox.Message(topic, payload, …)",
            )
        limits.check(message)


def _sync_session(session: object) -> Session:
    match session:
        case Session():
            return session
        case AsyncSession():
            return session.sync_session
        case scoped_session() | async_scoped_session():
            return _sync_session(session())
    raise NotASessionError(
        f"session {shorten(session)}: isn't a SQLAlchemy session; "
        "pass the Session or AsyncSession of your transaction,"
        " or execute outbox.insert_statement(…) on a connection"
    )


@event.listens_for(Session, "before_flush")
def _write_waiting(session: Session, _context: UOWTransaction, _instances: Any) -> None:
    # Every session of the process comes through here: one look into a dict.
    if not session.info.pop(_WAITING, False):
        return
    waiting = [row for row in session.new if isinstance(row, AddedMessage)]
    if not waiting:
        return
    for row in waiting:
        session.expunge(row)
    connection = session.connection(bind_arguments={"mapper": AddedMessage})
    connection.execute(_insert([row.message for row in waiting]))


def _insert(messages: Sequence[Message]) -> Insert:
    rows = [
        (
            message.id,
            lane_of(message.key, message.id, message.priority),
            message.schema_version,
            message.available_at,
            message.topic,
            message.key,
            message.tenant,
            message.content_type,
            json.dumps(dict(message.headers), ensure_ascii=False),
            message.payload,
        )
        for message in messages
    ]
    arrays = [
        bindparam(None, list(values), ARRAY(type_), unique=True)
        for values, type_ in zip(zip(*rows, strict=True), _COLUMNS.values(), strict=True)
    ]
    added = (
        func.unnest(*arrays)
        .table_valued(*_COLUMNS, with_ordinality="position", name="added")
        .render_derived()
    )
    source = select(
        *(
            cast(added.c.headers, JSONB) if name == "headers" else added.c[name]
            for name in _COLUMNS
        )
    ).order_by(added.c.position)  # seq is drawn in this order
    return insert(message_table).from_select(
        list(_COLUMNS), source, include_defaults=False
    )
