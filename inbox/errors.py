"""Errors of a consumer, and the decisions that a handler can raise."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

from pillarbox.outbox.duration import check_duration, exact_duration, write_duration
from pillarbox.outbox.errors import OutboxError, one_line


class InvalidReceiptError(OutboxError, ValueError):
    """The receipt can't be written, and no retry would succeed."""


class MessageTooOldError(InvalidReceiptError):
    """The partition for the message's day is gone, so duplicates can't be detected."""

    def __init__(
        self, message_id: UUID, message_at: datetime, *, was_dropped: bool = False
    ) -> None:
        self.message_id = message_id
        self.message_at = message_at
        if was_dropped:
            super().__init__(
                f"message id {message_id}: may have been handled: the receipts of"
                f" {message_at.isoformat()} were dropped too early, because a clock"
                " was ahead; check its effects, and handle it manually if there are"
                " none"
            )
            return
        age = write_duration(datetime.now(UTC) - message_at)
        super().__init__(
            f"message id {message_id}: is {age} old, and inbox.receipt no longer has"
            " a partition for its day; handle it manually, or raise the retention of"
            " inbox.receipt above the age of replayed messages"
        )


class MessageTooNewError(InvalidReceiptError):
    """The partition for the message's day doesn't exist yet."""

    def __init__(self, message_id: UUID, message_at: datetime) -> None:
        self.message_id = message_id
        self.message_at = message_at
        super().__init__(
            f"message id {message_id}: inbox.receipt has no partition for"
            f" {message_at.isoformat()} yet; check the producer's clock, and that"
            " outbox.maintain() runs"
        )


class HandlerTimeoutError(OutboxError, TimeoutError):
    """A handler exceeded its time limit, and its work was rolled back."""

    def __init__(self, handler: str, limit: timedelta) -> None:
        self.limit = limit
        super().__init__(
            f"handler {handler}: exceeded its time limit of {exact_duration(limit)};"
            " raise time_limit, or do less per message"
        )


class IdleTimeoutError(OutboxError):
    """A handler's connection was lost because its transaction was idle for too long."""

    def __init__(
        self, limit: timedelta | None, seconds: float, error: Exception
    ) -> None:
        if limit is None:
            named = "idle_in_transaction_session_timeout"
        else:
            named = f"max_idle={exact_duration(limit)}"
        super().__init__(
            f"connection lost after {seconds:.1f}s: PostgreSQL ends a transaction"
            f" that is idle for longer than {named}; set a timeout for HTTP requests,"
            " use a long handler (consumer.job), or raise max_idle"
            f" ({one_line(error)})"
        )


class SpecialError(RuntimeError):
    """A handler raised what isn't an ordinary exception, such as SystemExit."""


class HandlerTransactionError(OutboxError):
    """A handler's transaction can't be committed with its receipt.

    The handler ended the transaction, or tried to, or caught a database error that
    makes PostgreSQL roll it back.

    Attributes:
        may_be_committed: False if nothing was committed. True if the handler ended the
            transaction bypassing its session: the receipt may be committed, with what
            the handler did before, and a retry would be skipped as a duplicate.
    """

    may_be_committed = False

    @classmethod
    def by_call(cls, call: str) -> "HandlerTransactionError":
        """Return the error for a call that ends the transaction, or would."""
        return cls(
            f"{call}: refused, and nothing was committed: receipt and effects commit"
            " together after the handler returns; remove the call, or use a"
            " savepoint: session.begin_nested(), or psycopg's"
            " connection.transaction()"
        )

    @classmethod
    def by_error(cls, caught: str | None) -> "HandlerTransactionError":
        """Return the error for a database error that the handler caught."""
        what = "a database error" if caught is None else f"a database error ({caught})"
        return cls(
            f"nothing was committed: the handler caught {what}, which aborts its"
            " transaction; use a savepoint (with session.begin_nested(): …, or"
            " psycopg's with connection.transaction(): …) and catch the error outside"
            " it, or let the handler raise it"
        )

    @classmethod
    def by_open_block(cls) -> "HandlerTransactionError":
        """Return the error for a block that a handler left open on its connection."""
        return cls(
            "nothing was committed: the handler left a transaction(), pipeline(),"
            " copy() or stream() open; use a with statement, for stream() with"
            " contextlib.aclosing or closing"
        )


class ConnectionLostError(HandlerTransactionError):
    """A handler's connection was lost; nothing was committed."""

    def __init__(self, error: Exception | None = None) -> None:
        why = "" if error is None else f": {one_line(error)}"
        super().__init__(f"the handler's connection was lost{why}")


class TransactionEndedError(HandlerTransactionError):
    """The `HandlerTransactionError` after which effects may be committed."""

    may_be_committed = True

    def __init__(self) -> None:
        super().__init__(
            "COMMIT or ROLLBACK: the handler ended its own transaction, so its"
            " earlier effects may be committed, with the receipt; check them. In a"
            " handler, execute no COMMIT or ROLLBACK, and don't set"
            " default_transaction_read_only; use a savepoint: session.begin_nested(),"
            " or psycopg's connection.transaction()"
        )


class JobLostError(OutboxError):
    """A long handler lost its lease, and its transaction was rolled back."""

    def __init__(self, message_id: UUID) -> None:
        self.message_id = message_id
        super().__init__(
            f"job {message_id}: lease lost, another process may be running it; unless"
            " this process was frozen, use a longer lease"
        )


class RetryLater(Exception):  # noqa: N818 (a decision, no error)
    """Raised by a handler: roll back, and call the handler again after `delay`.

    This is not a failure and doesn't count as an attempt. Later messages of the key
    wait. The delay is kept in memory: if the consumer stops before it has passed, the
    message is returned to the broker, and the next process calls the handler at once.

    Args:
        delay: how long to wait.
        reason: why, for logs and `pillarbox blocked`.
    """

    def __init__(self, delay: timedelta, reason: str = "requested by the handler"):
        check_duration("delay", delay)
        if delay < timedelta(0):
            raise ValueError(f"delay={exact_duration(delay)}: must not be negative")
        self.delay = delay
        self.reason = reason
        super().__init__(f"retry in {exact_duration(delay)}: {reason}")


class DeadLetter(Exception):  # noqa: N818 (a decision, no error)
    """Raised by a handler: roll back, and dead-letter the message.

    Args:
        reason: why; stored in the dead letter.
    """

    def __init__(self, reason: str = "requested by the handler") -> None:
        self.reason = reason
        super().__init__(reason)
