"""Add messages to the caller's own transaction.

The messages of a flush are one pending object of an ordinary mapped class, which the
unit of work inserts. So whatever follows it sees a write like any other, and savepoints
keep or discard it. An object for each message would take as long as its insert.
"""

from collections.abc import Coroutine
from typing import Any, Final, NoReturn, Unpack, overload
from uuid import UUID

from sqlalchemy import Connection, Insert, event, inspect
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import (
    Session,
    SessionTransaction,
    SessionTransactionOrigin,
    scoped_session,
)
from sqlalchemy.orm import registry as orm_registry

from pillarbox.outbox import tracing
from pillarbox.outbox.connections import (
    AsyncConnectionOf,
    SyncConnection,
    insert_on,
    is_connection,
)
from pillarbox.outbox.errors import (
    ConfigError,
    InvalidMessageError,
    NotASessionError,
    shorten,
)
from pillarbox.outbox.limits import Limits, check_reserved
from pillarbox.outbox.message import Details, Message
from pillarbox.outbox.payload.payload_codec import PayloadCodec, encoded
from pillarbox.outbox.payload.schema_registry import REGISTRY, SchemaRegistry
from pillarbox.outbox.schema import insert_of, message_table, metadata
from pillarbox.outbox.session import (
    AnySession,
    is_async_scoped_session,
    is_async_session,
    is_sharded_session,
    refuse_autocommit,
)
from pillarbox.outbox.tracing import cause_of, cause_on, caused
from pillarbox.outbox.unsent import Batch, uncommitted

_LIMITS: Final = Limits()
_LATE: Final = "outbox.messages_late"


class _NothingToAwait:
    """Names the mistake in `await add(async_session, message)`."""

    def __await__(self) -> NoReturn:
        raise NotASessionError(
            "await add(…): the message was added, but there is nothing to await;"
            " remove await, which only an AsyncConnection needs"
        )


NOTHING_TO_AWAIT: Final = _NothingToAwait()


@orm_registry(metadata=metadata).mapped
class AddedMessages:
    """The messages that a session's next flush inserts.

    Attributes:
        id: that of the first message.
        messages: what `MessageInsert` takes in place of a row's payload.
    """

    __tablename__ = "message"
    __table__ = message_table
    __mapper_args__: Final = {
        # Nothing is read back: the application's role may only insert.
        "eager_defaults": False,
        "include_properties": ["id"],
        "properties": {"messages": message_table.c.payload},
        "primary_key": [message_table.c.id],
    }

    def __init__(self, messages: list[Message]) -> None:
        self.id = messages[0].id
        self.messages = messages


@overload
def add(
    session: "AnySession | SyncConnection",
    *messages: object,
    limits: Limits = _LIMITS,
    registry: SchemaRegistry = REGISTRY,
    codec: PayloadCodec | None = None,
    **details: Unpack[Details],
) -> None: ...


@overload
def add(
    session: AsyncConnectionOf,
    *messages: object,
    limits: Limits = _LIMITS,
    registry: SchemaRegistry = REGISTRY,
    codec: PayloadCodec | None = None,
    **details: Unpack[Details],
) -> Coroutine[Any, Any, None]: ...


def add(
    session: "AnySession | SyncConnection | AsyncConnectionOf",
    *messages: object,
    limits: Limits = _LIMITS,
    registry: SchemaRegistry = REGISTRY,
    codec: PayloadCodec | None = None,
    **details: Unpack[Details],
) -> Any:
    """Add messages to the transaction of `session`.

    They are published if and only if that transaction commits. `add` does no I/O, so
    there is nothing to await: the rows are inserted by the next flush, at the latest by
    the commit. With `Session(binds=…)`, bind `pillarbox.outbox.schema.message_table`,
    too. Like the session, `add` is not thread-safe. In the transaction of a receipt,
    the messages carry the id of the handled message as `causation-id`. If the process
    is traced, they carry the trace context as `traceparent`.

    A session that is closed without a commit, a rollback or an exception loses its
    messages. That is logged, and unless it is an `AsyncSession`, an
    `UnsentMessagesWarning` is issued.

    `session` can also be a connection of SQLAlchemy Core or psycopg. Then the rows are
    inserted at once; with an async connection, await the call.

    Adding no message does nothing, so `add(session, *events)` needs no prior check.

    Args:
        session: the caller's, in its transaction.
        messages: each is a `Message`, or an instance of a class that `@event` has bound
            to a topic.
        limits: the limits of a message, checked before and after it is encoded.
        registry: the schemas that payloads must match before they are encoded.
        codec: encodes the payloads at once, so that no table holds the originals.
        details: the key and other attributes of messages made from events.

    Raises:
        InvalidMessageError: a message breaks a rule, doesn't match the schema that is
            registered for its topic, or can't be encoded; no message of the call was
            added, and the session is unchanged.
        NotASessionError: `session` isn't one.
        ConfigError: it is a `ShardedSession`, or its transaction has ended or failed:
            in a listener for `after_commit` or `after_rollback`, or after a failed
            flush.

    The flush that writes them raises `AutocommitError` if the session's connection is
    in AUTOCOMMIT mode, where a rollback would keep them, and `ConfigError` if the
    session has no bind for their table; then nothing was written.
    """
    if is_connection(session):
        made = tuple(_message(message, registry, details) for message in messages)
        made = _checked(made, limits, registry, codec)
        return insert_on(session, _with_cause(made, cause_on(session)))
    target = sync_session(session)
    if is_sharded_session(target):
        raise ConfigError(
            f"session {shorten(target)}: is a ShardedSession, but a message has no "
            "shard; name that of the rows that belong to it: session."
            "execute(insert_statement(…), bind_arguments={'shard_id': …})"
        )
    transaction = target.get_transaction()
    if transaction is not None and not transaction.is_active:
        raise ConfigError(
            f"session {shorten(target)}: its transaction has ended or failed, so no "
            "commit would send the message; a listener for after_commit or "
            "after_rollback is too late: use before_commit, or another transaction: "
            "with sessions.begin() as session: add(session, message)"
        )
    made = tuple(_message(message, registry, details) for message in messages)
    if made:
        _add(target, _checked(made, limits, registry, codec))
    return NOTHING_TO_AWAIT if is_async_session(session) else None


def _add(target: Session, messages: tuple[Message, ...]) -> None:
    messages = _with_cause(messages, cause_of(target))
    batches = uncommitted(target)
    if _LATE in target.info:
        if (late := target.info[_LATE]) is not None:
            late += messages
        else:
            _write(target, [*messages])
    elif batches and batches[-1].is_pending:
        batches[-1].messages += messages
    else:
        row = AddedMessages([*messages])
        target.add(row)
        batches.append(Batch(target, row.messages, inspect(row)))


def _with_cause(
    messages: tuple[Message, ...], cause: UUID | None
) -> tuple[Message, ...]:
    if cause is None:
        return messages
    return tuple(caused(message, cause) for message in messages)


def insert_statement(
    *messages: Message,
    limits: Limits = _LIMITS,
    registry: SchemaRegistry = REGISTRY,
    codec: PayloadCodec | None = None,
) -> Insert:
    """Build one INSERT of all messages, to execute on a connection of your own.

    The statement's text is the same for any number of messages.

    Args:
        messages: at least one.
        limits: as for `add`.
        registry: as for `add`.
        codec: as for `add`.

    Raises:
        InvalidMessageError: a message breaks a rule, doesn't match its schema or can't
            be encoded, or there is no message.

    On a connection in AUTOCOMMIT mode, executing it raises `AutocommitError`.
    """
    if not messages:
        raise InvalidMessageError("messages", (), "is empty", "pass at least one")
    messages = tuple(_message(message, registry, {}) for message in messages)
    return insert_of(_checked(messages, limits, registry, codec))


def _message(given: object, registry: SchemaRegistry, details: Details) -> Message:
    if isinstance(given, Message):
        if details:
            raise InvalidMessageError(
                *next(iter(details.items())),
                "was passed beside a Message",
                "pass it to Message(…), or an event instead of the message",
            )
        return given
    bound = registry.topic_of(type(given))
    if bound is None:
        raise InvalidMessageError(
            "object",
            type(given),
            "isn't a Message",
            "pass Message(topic, payload, …), or bind its class to a topic with @event;"
            " several are passed one by one: add(session, *messages)",
        )
    topic, version = bound
    return Message(topic, given, schema_version=version, **details)


def _checked(
    messages: tuple[Message, ...],
    limits: Limits,
    registry: SchemaRegistry,
    codec: PayloadCodec | None,
) -> tuple[Message, ...]:
    for message in messages:
        limits.check(message)
        check_reserved(message.headers)
        registry.check(message)
    if codec is not None:
        messages = tuple(encoded(message, codec) for message in messages)
        for message in messages:
            limits.check(message)
    if tracing.tracer is not None:
        messages = tracing.tracer.create(messages)
    return messages


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
    raise NotASessionError(
        f"session {shorten(session)}: isn't a SQLAlchemy session; pass the Session or "
        "AsyncSession of your transaction, or its connection: with sessions.begin() as "
        "session: add(session, message)"
    )


@event.listens_for(Session, "before_flush")
def _check_connection(session: Session, *_: Any) -> None:
    # If the connection is refused, the messages stay pending, and nothing was written.
    batches = uncommitted(session)
    if batches and batches[-1].is_pending:
        connection_of(session)


def flush_messages(session: Session) -> None:
    """Insert the messages that wait for the session's next flush."""
    batches = uncommitted(session)
    if batches and batches[-1].is_pending:
        session.flush()


def connection_of(session: Session, subject: str = "the messages") -> Connection:
    """Return the connection on which a session writes messages.

    Args:
        subject: what is written, for the error message.

    Raises:
        ConfigError: the session has no bind for them.
        AutocommitError: the connection commits each statement separately.
    """
    try:
        connection = session.connection(bind_arguments={"mapper": AddedMessages})
    except UnboundExecutionError as error:
        raise ConfigError(
            "the session has no bind for outbox.message; add one: Session(binds={…, "
            "pillarbox.outbox.schema.message_table: engine}), with the engine of the "
            "tables that the same transaction writes"
        ) from error
    refuse_autocommit(connection, subject)
    return connection


@event.listens_for(Session, "after_transaction_create")
def _begin_flush(session: Session, transaction: SessionTransaction) -> None:
    # From now on the flush takes no new objects. Messages that a mapper's event adds
    # come after those that are pending.
    if transaction.origin is SessionTransactionOrigin.SUBTRANSACTION:
        session.info[_LATE] = []


@event.listens_for(Session, "after_flush")
def _write_late(session: Session, _: object) -> None:
    late, session.info[_LATE] = session.info.get(_LATE), None
    if late:
        _write(session, late)


@event.listens_for(Session, "after_transaction_end")
def _end_flush(session: Session, transaction: SessionTransaction) -> None:
    if transaction.origin is SessionTransactionOrigin.SUBTRANSACTION:
        late = session.info.pop(_LATE, None)
        # `bulk_save_objects` ends without `after_flush`.
        if late and session.is_active:
            _add(session, tuple(late))


def _write(session: Session, messages: list[Message]) -> None:
    connection_of(session).execute(message_table.insert(), {"payload": messages})
    uncommitted(session).append(Batch(session, messages))
