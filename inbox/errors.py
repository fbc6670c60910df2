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
                f"message id {message_id}: was made at {message_at.isoformat()}, and "
                "the receipts of that time were dropped before their retention was "
                "over, by a clock that was ahead; it is unknown whether it was "
                "handled: check its effects, and handle it manually if there are none"
            )
            return
        age = write_duration(datetime.now(UTC) - message_at)
        super().__init__(
            f"message id {message_id}: was made {age} ago, and inbox.receipt no longer "
            "has a partition for that day; handle it by hand, or raise the retention "
            "of inbox.receipt above the age of what you replay"
        )


class MessageTooNewError(InvalidReceiptError):
    """The partition for the message's day doesn't exist yet."""

    def __init__(self, message_id: UUID, message_at: datetime) -> None:
        self.message_id = message_id
        self.message_at = message_at
        super().__init__(
            f"message id {message_id}: dates from {message_at.isoformat()}, "
            "and inbox.receipt has no partition for that day yet; check the clock of "
            "its producer, and that outbox.maintain() runs"
        )


class HandlerTimeoutError(OutboxError, TimeoutError):
    """A handler exceeded its time limit, and its work was rolled back."""

    def __init__(self, handler: str, limit: timedelta) -> None:
        self.limit = limit
        super().__init__(
            f"handler {handler}: took longer than its time limit of "
            f"{exact_duration(limit)}; raise time_limit, or do less in one message"
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
            f"the connection was lost after {seconds:.1f}s: PostgreSQL ends a "
            f"transaction that is idle for longer than {named}; don't wait for so long "
            "between two statements: set a timeout for HTTP requests, use a long "
            f"handler (consumer.job), or raise max_idle ({one_line(error)})"
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
            f"{call}: refused, because a handler must not end its transaction: receipt "
            "and effects commit together after it has returned, and now nothing was "
            "committed; remove the call; for a part that may be rolled back use "
            "session.begin_nested(), or connection.transaction() of psycopg"
        )

    @classmethod
    def by_error(cls, caught: str | None) -> "HandlerTransactionError":
        """Return the error for a database error that the handler caught."""
        what = "a database error" if caught is None else f"a database error ({caught})"
        return cls(
            f"{what} was caught inside the transaction, and PostgreSQL would turn its "
            "COMMIT into a ROLLBACK, without receipt or effects; execute what may fail "
            "in a savepoint (with session.begin_nested(): …, or psycopg's with "
            "connection.transaction(): …) and catch the error outside of that, or let "
            "it leave the handler"
        )

    @classmethod
    def by_open_block(cls) -> "HandlerTransactionError":
        """Return the error for a block that a handler left open on its connection."""
        return cls(
            "the handler left a block of its connection open, and nothing was "
            "committed: a transaction(), pipeline(), copy() or stream(); use it in a "
            "with statement, and stream() with contextlib.aclosing or closing"
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
            "COMMIT or ROLLBACK: the handler ended its transaction itself; "
            "what it did before that may be committed, with the receipt, and "
            "what it did after it is not; check which of its effects exist; execute no "
            "COMMIT or ROLLBACK in the handler, don't set "
            "default_transaction_read_only, which marks the transaction, and use "
            "session.begin_nested(), or connection.transaction() of psycopg, for a "
            "part that may be rolled back"
        )


class JobLostError(OutboxError):
    """A long handler lost its lease, and its transaction was rolled back."""

    def __init__(self, message_id: UUID) -> None:
        self.message_id = message_id
        super().__init__(
            f"job {message_id}: its lease is lost, and another process may have it; "
            "if the process was not frozen, use a longer lease"
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
