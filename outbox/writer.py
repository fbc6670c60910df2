"""Add messages to the caller's own transaction.

The rows wait in the session as pending objects, so rolling back a savepoint discards
its messages. When the session flushes, one statement inserts all of them: separate
statements would cost a trigger call and a round trip per message.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Never
from typing import cast as typing_cast

from sqlalchemy import (
    ARRAY,
    BindParameter,
    Connection,
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
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.orm import registry as orm_registry
from typing_extensions import override

from outbox import tracing
from outbox.array_literal import bytes_array, moment_array, plain_array, text_array
from outbox.errors import InvalidMessageError, NotASessionError, shorten
from outbox.lane import lane_of
from outbox.limits import Limits, check_reserved
from outbox.message import Message
from outbox.payload_codec import PayloadCodec, encoded
from outbox.schema import message_table, metadata
from outbox.schema_registry import REGISTRY, SchemaRegistry
from outbox.session import (
    AnySession,
    is_async_scoped_session,
    is_async_session,
    is_async_sessionmaker,
    refuse_autocommit,
)
from outbox.tracing import cause_of, caused
from outbox.unsent import UnsentMessages, watch

_encode = json.JSONEncoder(ensure_ascii=False).encode
_LIMITS: Final = Limits()

on_write: Final[list[Callable[[Session, Sequence[Message]], None]]] = []
"""Called with messages that a session has just inserted, for `outbox.testing`."""

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
_LITERAL: Final[dict[str, Callable[[list[Any]], str]]] = {
    "id": plain_array,
    "lane": plain_array,
    "schema_version": plain_array,
    "available_at": moment_array,
    "payload": bytes_array,
}


class Added(UnsentMessages):
    """Messages that wait in a session for its next flush, as one pending object.

    A savepoint flushes before it begins, so waiting messages belong to the innermost
    transaction, and the session drops them when that is rolled back.
    """


orm_registry(metadata=metadata).map_imperatively(Added, message_table)


def add(
    session: AnySession,
    *messages: Message,
    limits: Limits = _LIMITS,
    registry: SchemaRegistry = REGISTRY,
    codec: PayloadCodec | None = None,
) -> None:
    """Add messages to the transaction of `session`.

    They are published if and only if that transaction commits. `add` does no I/O, so
    there is nothing to await: the rows are inserted by the next flush, at the latest by
    the commit. With `Session(binds=…)`, bind the tables of `outbox.schema.metadata`,
    too. Like the session, `add` is not thread-safe. In the transaction of a receipt,
    the messages carry the id of the handled message as `causation-id`. If the process
    is traced, they carry the trace context as `traceparent`.

    A session that is closed or garbage-collected before it was flushed, without a
    rollback or an exception, loses its messages. That is logged, and an
    `UnsentMessagesWarning` is issued.

    Adding no message does nothing, so `add(session, *events)` needs no prior check.

    Args:
        limits: the limits of a message, checked before and after it is encoded.
        registry: the schemas that payloads must match before they are encoded.
        codec: encodes the payloads at once, so that no table holds the originals.

    Raises:
        InvalidMessageError: a message breaks a rule, doesn't match the schema that is
            registered for its topic, or can't be encoded; no message of the call was
            added, and the session is unchanged.
        NotASessionError: `session` isn't one.
        TypeError: `add` was awaited; the messages were added nevertheless.

    The flush that writes them raises `AutocommitError` if the session's connection is
    in AUTOCOMMIT mode, where a rollback would keep them; then nothing was written.
    """
    target = sync_session(session)
    messages = _checked(messages, limits, registry, codec)
    if messages:
        _add(target, messages)
    # To type checkers it is None, so that they reject an await, too.
    return typing_cast("None", ADDED)


def _add(target: Session, messages: tuple[Message, ...]) -> None:
    cause = cause_of(target)
    if cause is not None:
        messages = tuple(caused(message, cause) for message in messages)
    if target._flushing:
        # A listener of this flush called `add`: the ORM would insert a new pending
        # object itself.
        _write_waiting(target)
        _write(target, _connection(target), messages)
        return
    waiting = target.info.get(_WAITING)
    if waiting is None or waiting not in target:
        waiting = target.info[_WAITING] = Added()
        target.add(waiting)
        watch(target, waiting)
    waiting.messages.extend(messages)


def insert_statement(
    *messages: Message,
    limits: Limits = _LIMITS,
    registry: SchemaRegistry = REGISTRY,
    codec: PayloadCodec | None = None,
) -> Insert:
    """Build one INSERT of all messages, to execute on a connection of your own.

    The statement's text is the same for any number of messages. The arguments are those
    of `add`.

    Raises:
        InvalidMessageError: a message breaks a rule, doesn't match its schema or can't
            be encoded, or there is no message.

    On a connection in AUTOCOMMIT mode, executing it raises `AutocommitError`.
    """
    if not messages:
        raise InvalidMessageError("messages", (), "is empty", "pass at least one")
    messages = _checked(messages, limits, registry, codec)
    return _insert(
        {
            name: bindparam(None, literal, Text(), unique=True)
            for name, literal in _arrays([_row(m) for m in messages]).items()
        }
    )


def _checked(
    messages: tuple[Message, ...],
    limits: Limits,
    registry: SchemaRegistry,
    codec: PayloadCodec | None,
) -> tuple[Message, ...]:
    for message in messages:
        if not isinstance(message, Message):
            raise _not_a_message(message)
        limits.check(message)
        check_reserved(message.headers)
        registry.check(message)
    if codec is not None:
        messages = tuple(encoded(message, codec) for message in messages)
        for message in messages:
            limits.check(message)
    if tracing.tracer is not None:
        messages = _traced(tracing.tracer, messages, limits)
    return messages


def _traced(
    tracer: tracing.Tracer, messages: tuple[Message, ...], limits: Limits
) -> tuple[Message, ...]:
    return tuple(
        new if new is not message and _fits(new, limits) else message
        for message, new in zip(messages, tracer.create(messages), strict=True)
    )


def _fits(message: Message, limits: Limits) -> bool:
    # There may be no room for one more header.
    try:
        limits.check(message)
    except InvalidMessageError:
        return False
    return True


def sync_session(session: object) -> Session:
    """Return the `Session` that holds the pending objects, given a session of any kind.

    Raises:
        NotASessionError: `session` isn't one.
    """
    if isinstance(session, Session):
        return session
    if isinstance(session, scoped_session):
        return sync_session(session())
    if is_async_session(session):
        return session.sync_session
    if is_async_scoped_session(session):
        return sync_session(session())
    if isinstance(session, sessionmaker):
        remedy = "it makes sessions: with sessions.begin() as session: add(session, …)"
    elif is_async_sessionmaker(session):
        remedy = (
            "it makes sessions: async with sessions.begin() as session: add(session, …)"
        )
    elif isinstance(session, Connection):
        remedy = "on a connection execute(outbox.insert_statement(…))"
    elif isinstance(session, Message):
        remedy = "it is the first argument: add(session, message)"
    else:
        remedy = (
            "pass the Session or AsyncSession of your transaction,"
            " or execute outbox.insert_statement(…) on a connection"
        )
    raise NotASessionError(
        f"session {shorten(session)}: isn't a SQLAlchemy session; {remedy}"
    )


def _not_a_message(given: object) -> InvalidMessageError:
    remedy = "pass outbox.Message(topic, payload, …)"
    if not isinstance(given, str | bytes | Mapping) and isinstance(given, Iterable):
        remedy = "pass messages one by one, add(session, *messages)"
    return InvalidMessageError("object", type(given), "isn't a Message", remedy)


class _Added:
    """The return value of `add`, which raises an error if it is awaited."""

    @override
    def __repr__(self) -> str:
        return "<added>"

    if not TYPE_CHECKING:

        def __await__(self) -> Never:
            raise TypeError(
                "outbox.add does no I/O and can't be awaited: write "
                "outbox.add(session, message), with an AsyncSession, too"
            )


ADDED: Final[object] = _Added()
"""What `add` returns: there is nothing to await."""


@event.listens_for(Session, "before_flush")
def _write_waiting(session: Session, *_: Any) -> None:
    # Every flush in the process runs this, so it is one look-up in a dict.
    waiting: Added | None = session.info.get(_WAITING)
    if waiting is None:
        return
    if waiting not in session:
        del session.info[_WAITING]
        return
    # If the connection is rejected, the messages stay pending, so that no later flush
    # leaves them out. Their loss isn't reported: the caller of the flush gets the
    # error.
    waiting.is_settled = True
    connection = _connection(session)
    del session.info[_WAITING]
    session.expunge(waiting)
    _write(session, connection, waiting.messages)


def _connection(session: Session) -> Connection:
    connection = session.connection(bind_arguments={"mapper": Added})
    refuse_autocommit(connection, "the messages")
    return connection


def _write(
    session: Session, connection: Connection, messages: Sequence[Message]
) -> None:
    rows = [_row(message) for message in messages]
    if len(rows) == 1:
        connection.execute(_INSERT_ONE, rows[0])
    else:
        connection.execute(_INSERT_MANY, _arrays(rows))
    for listener in on_write:
        listener(session, messages)


class _InsertInTransaction(Insert):
    """An INSERT that fails on a connection where a rollback would keep its rows."""

    inherit_cache = True

    @override
    def _execute_on_connection(self, connection: Connection, *arguments: Any) -> Any:
        refuse_autocommit(connection, "the messages")
        return super()._execute_on_connection(connection, *arguments)


def _row(message: Message) -> dict[str, Any]:
    return {
        "id": message.id,
        "lane": lane_of(message.key, message.id, message.priority),
        "schema_version": message.schema_version,
        "available_at": message.available_at,
        "topic": message.topic,
        "key": message.key,
        "tenant": message.tenant,
        "content_type": message.content_type,
        "headers": _encode(message.headers),
        "payload": message.payload,
    }


def _arrays(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {
        name: _LITERAL.get(name, text_array)([row[name] for row in rows])
        for name in _COLUMNS
    }


def _insert(arrays: Mapping[str, BindParameter[Any]]) -> Insert:
    added = (
        func.unnest(
            *(
                cast(cast(arrays[name], Text()), ARRAY(type_))
                for name, type_ in _COLUMNS.items()
            )
        )
        .table_valued(*_COLUMNS, with_ordinality="position", name="added")
        .render_derived()
    )
    source = select(
        *(
            cast(added.c.headers, JSONB) if name == "headers" else added.c[name]
            for name in _COLUMNS
        )
    ).order_by(added.c.position)  # seq is drawn in this order
    return _InsertInTransaction(message_table).from_select(
        list(_COLUMNS), source, include_defaults=False
    )


# Built once: building it for each flush takes longer than running it (0.7 ms of a
# transaction of 1.9 ms). For one row, VALUES takes the server a third of the time of
# unnest().
_INSERT_MANY: Final = _insert(
    {name: bindparam(name, type_=Text()) for name in _COLUMNS}
)
_INSERT_ONE: Final = (
    insert(message_table)
    .values(
        {
            name: cast(bindparam(name, type_=Text()), JSONB)
            if name == "headers"
            else bindparam(name, type_=type_)
            for name, type_ in _COLUMNS.items()
        }
    )
    .inline()  # no RETURNING, for which the application's role lacks the privilege
)
