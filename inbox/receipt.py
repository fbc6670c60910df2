"""The receipt: proof that a consumer has handled a message.

A single INSERT distinguishes a new message from a duplicate, and commits with the
handler's effects. The table is partitioned by a timestamp that is derived from the
message's id. So the id alone is unique, at a cost that doesn't grow with the number of
partitions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final, TypeAlias
from uuid import UUID

from sqlalchemy import (
    Table,
    TextualSelect,
    Uuid,
    __version__,
    bindparam,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, scoped_session

from pillarbox.inbox.connection import connection_of
from pillarbox.inbox.errors import (
    InvalidReceiptError,
    MessageTooNewError,
    MessageTooOldError,
)
from pillarbox.inbox.idle import max_idle_of
from pillarbox.inbox.schema import foreign_receipt_table, receipt_table
from pillarbox.inbox.transaction import MARKS, Held, hold
from pillarbox.outbox.array_literal import moment_array, plain_array
from pillarbox.outbox.errors import ConfigError, NotASessionError, shorten, sqlstate_of
from pillarbox.outbox.message_id import is_uuid7, moment_of
from pillarbox.outbox.postgres.sql_files import load
from pillarbox.outbox.tracing import set_cause
from pillarbox.outbox.writer import sync_session

# Together they form an index key, which is limited to about 2.7 KB.
_MAX_NAME_BYTES: Final = 512
_MAX_ID_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class ForeignId:
    """An id that isn't a UUIDv7, such as a Stripe event id or a Kafka offset.

    Attributes:
        source: the system that assigned the id; ids must be unique within a source.
        id: the id as text.
    """

    source: str
    id: str

    def __post_init__(self) -> None:
        """Refuse an empty id, and an id that can't be stored."""
        check_text("source", self.source)
        check_text("id", self.id, _MAX_ID_BYTES)


MessageId: TypeAlias = UUID | ForeignId


class _Insert:
    """Inserts a row if new, marks the transaction, and can limit its idle time."""

    # Built once, since building the statement costs as much as running it. Without
    # RETURNING, so that INSERT is the only privilege that the role needs.
    def __init__(self, table: Table, *names: str) -> None:
        values = [bindparam(name, type_=table.c[name].type) for name in names]
        row = select(*values).where(MARKS)
        inserting = insert(table).from_select(list(names), row)
        self._statement = inserting.on_conflict_do_nothing().inline()

    def is_new(self, session: Session, held: Held, values: dict[str, Any]) -> bool:
        values = {**values, "max_idle": max_idle_of(session)}
        result = held.execute(self._statement, values, preserve_rowcount=True)
        count = result.rowcount
        if count < 0:
            # Treating this as a duplicate would silently skip every message.
            raise ConfigError(
                f"rowcount={count} of an INSERT: SQLAlchemy {__version__} doesn't "
                "report whether the receipt is new; use 2.0.31 or newer, with psycopg "
                "or asyncpg"
            )
        return count == 1


_INSERT: Final = _Insert(receipt_table, "message_id", "message_at", "consumer")
_INSERT_FOREIGN: Final = _Insert(
    foreign_receipt_table, "source", "message_id", "consumer"
)
_CHECK_VIOLATION: Final = "23514"
# Upkeep adds this constraint when it recreates a partition for days that it dropped.
_FORGOTTEN: Final = "not_forgotten_"


def record_receipt(session: Session, message_id: MessageId, consumer: str) -> bool:
    """Record in the session's transaction that `consumer` handles the message.

    Returns True if the message is new, and False for a duplicate. If another
    transaction is recording the same receipt, the call waits for it to end: if it
    commits, the message is a duplicate; if it rolls back, the message is new. With an
    `AsyncSession`: `await session.run_sync(record_receipt, message_id, consumer)`.

    Args:
        session: the caller's, in its transaction.
        message_id: a UUIDv7, or a `ForeignId` for any other id.
        consumer: the name on the receipt: each consumer handles a message once.

    Raises:
        MessageTooOldError: its day is older than the retention of `inbox.receipt`.
        MessageTooNewError: the partition for its day doesn't exist yet.
        InvalidReceiptError: the id is a `str` or not a UUIDv7, an argument is invalid,
            or the receipt is that of a handler which is running in the transaction.
        NotASessionError: `session` isn't a `Session`.
        AutocommitError: its connection is in AUTOCOMMIT mode.

    After either of the first two errors, the transaction can only be rolled back, as
    after any statement that PostgreSQL rejects: its commit raises
    `HandlerTransactionError`.
    """
    if not isinstance(session, Session | scoped_session):
        raise NotASessionError(
            f"session {shorten(session)}: isn't a SQLAlchemy Session; pass that of "
            "your transaction, or for an AsyncSession call "
            "await session.run_sync(record_receipt, message_id, consumer)"
        )
    check_text("consumer", consumer)
    session = sync_session(session)
    if isinstance(message_id, ForeignId):
        values: dict[str, Any] = {
            "source": message_id.source,
            "message_id": message_id.id,
            "consumer": consumer,
        }
        inserting = _INSERT_FOREIGN
    else:
        check_id(message_id)
        values = {
            "message_id": message_id,
            "message_at": moment_of(message_id),
            "consumer": consumer,
        }
        inserting = _INSERT
    held = hold(session)
    if (message_id, consumer) in held.handled:
        raise InvalidReceiptError(
            f"message id {message_id}: consumer {shorten(consumer)} is already"
            " handling it in this transaction; give the nested function its own"
            " consumer name"
        )
    if isinstance(message_id, ForeignId):
        return inserting.is_new(session, held, values)
    try:
        is_new = inserting.is_new(session, held, values)
    except DBAPIError as error:
        refused = refusal(error, message_id)
        if refused is None:
            raise
        raise refused from error
    if is_new:
        set_cause(session, message_id)
    return is_new


def has_receipt(message_id: UUID, consumer: str, session: Session) -> bool:
    """Return whether the consumer has a receipt for the message."""
    found = select(receipt_table.c.message_id).filter_by(
        message_id=message_id, message_at=moment_of(message_id), consumer=consumer
    )
    return connection_of(session).execute(found).first() is not None


def record_receipts(
    session: Session, message_ids: Sequence[UUID], consumer: str
) -> set[UUID]:
    """Record many receipts in one statement; return the ids that were new.

    Raises:
        InvalidReceiptError: one of them can't be recorded. Then none is, and the
            transaction can only be rolled back. For a single id, raises what
            `record_receipt` raises.
    """
    values = receipt_values(message_ids, consumer, max_idle_of(session))
    held = hold(session)
    try:
        found = held.execute(insert_receipts(), values).scalars()
    except DBAPIError as error:
        if (refused := refusal_of_many(error, message_ids)) is not None:
            raise refused from error
        raise
    return set(found)


def receipt_values(
    message_ids: Sequence[UUID], consumer: str, max_idle: str | None
) -> dict[str, str | None]:
    """Return the parameters of `insert_receipts.sql`.

    Raises:
        InvalidReceiptError: an id contains no timestamp, or the name is invalid.
    """
    check_text("consumer", consumer)
    for id in message_ids:
        check_id(id)
    # Sorted, so that two batches never deadlock.
    ids = sorted(set(message_ids))
    return {
        "ids": plain_array(ids),
        "moments": moment_array([moment_of(id) for id in ids]),
        "consumer": consumer,
        "max_idle": max_idle,
    }


@cache
def insert_receipts() -> TextualSelect:
    """Return the statement that takes `receipt_values`, and returns the new ids."""
    statement = text(load("inbox", "insert_receipts"))
    return statement.columns(message_id=Uuid())


def check_id(message_id: object) -> None:
    """Refuse an id that contains no timestamp.

    Raises:
        InvalidReceiptError: it is a `str`, or not a UUIDv7.
    """
    if isinstance(message_id, str):
        raise InvalidReceiptError(
            f"message id {shorten(message_id)}: is a str; pass uuid.UUID(…) of a "
            "UUIDv7, or ForeignId(source, id) for other ids"
        )
    if not isinstance(message_id, UUID) or not is_uuid7(message_id):
        raise InvalidReceiptError(
            f"message id {shorten(message_id)}: isn't a UUIDv7; pass"
            " ForeignId(source, id) for other ids"
        )
    try:
        moment_of(message_id)
    except OverflowError:
        raise InvalidReceiptError(
            f"message id {message_id}: has a time after the year 9999; check the"
            " producer's clock"
        ) from None


def refusal_of_many(
    error: Exception, message_ids: Sequence[UUID]
) -> InvalidReceiptError | None:
    """Return the error for rejected rows; None if no message is the reason."""
    if sqlstate_of(error) != _CHECK_VIOLATION:
        return None
    if len(message_ids) == 1:
        return refusal(error, message_ids[0])
    why = _constraint(error) or "no partition for its day"
    return InvalidReceiptError(
        f"one of {len(message_ids)} receipts was refused ({why}); handle the messages"
        " one by one to find it"
    )


def refusal(error: Exception, message_id: UUID) -> InvalidReceiptError | None:
    """Return the error for a rejected row; None if its message is not the reason."""
    if sqlstate_of(error) != _CHECK_VIOLATION:
        return None
    # PostgreSQL also reports a missing partition with this SQLSTATE, but then without
    # the name of a constraint.
    constraint = _constraint(error)
    message_at = moment_of(message_id)
    if constraint is not None and constraint.startswith(_FORGOTTEN):
        return MessageTooOldError(message_id, message_at, was_dropped=True)
    if constraint is not None:
        return InvalidReceiptError(
            f"message id {message_id}: violates the constraint {constraint!r} of the"
            " inbox; run pillarbox migrate, so that schema and library match"
        )
    if message_at > datetime.now(UTC):
        return MessageTooNewError(message_id, message_at)
    return MessageTooOldError(message_id, message_at)


def check_text(field: str, value: object, max_bytes: int = _MAX_NAME_BYTES) -> None:
    """Refuse a value that can't be part of a receipt's key.

    Raises:
        InvalidReceiptError: it isn't a string, is empty, too long, or can't be stored.
    """
    if not isinstance(value, str) or not value or "\0" in value:
        raise InvalidReceiptError(
            f"receipt {field} {shorten(value)}: must be a non-empty str without NUL"
        )
    size = len(value.encode(errors="surrogatepass"))
    if size > max_bytes:
        raise InvalidReceiptError(
            f"receipt {field} {shorten(value)}: has {size} bytes, the limit is "
            f"{max_bytes}; pass a shorter one, such as a hash of it"
        )


def _constraint(error: Exception) -> str | None:
    original: Any = getattr(error, "orig", error)
    diagnosis = getattr(original, "diag", None)
    if diagnosis is None:
        # SQLAlchemy wraps asyncpg's error, which holds the name, in another error.
        diagnosis = original.__cause__
    return getattr(diagnosis, "constraint_name", None) or None
