"""`guard`: the receipt as a context manager, for code where a decorator doesn't fit."""

from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sqlalchemy.orm import Session, scoped_session

from pillarbox.inbox.processing import processing, received
from pillarbox.inbox.receipt import MessageId, check_text, record_receipt
from pillarbox.inbox.transaction import protected
from pillarbox.outbox import tracing
from pillarbox.outbox.errors import NotASessionError, shorten
from pillarbox.outbox.session import is_async_scoped_session, is_async_session

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

S = TypeVar(
    "S",
    Session,
    "AsyncSession",
    "scoped_session[Session]",
    "async_scoped_session[AsyncSession]",
)


class guard(Generic[S]):  # noqa: N801 (reads as a statement: with guard(…))
    """Record a message's receipt; yield whether the message is new.

        with session.begin(), guard(session, id, consumer="billing") as is_new:
            if is_new:
                ...

    Use `async with` for an `AsyncSession`. The receipt is part of the session's
    transaction: a rollback undoes both the receipt and the effects. So let an error
    propagate out of the transaction's block, or roll back after the guard's block.
    Inside the guard's block, the session can't be committed, rolled back or closed.

    Args:
        session: the caller's, in its transaction.
        message_id: a UUIDv7, or a `ForeignId` for any other id.
        consumer: the name on the receipt: each consumer handles a message once.
        headers: the message's headers, if this process is traced: the block's span
            joins the trace in which the message was added.

    Raises:
        InvalidReceiptError: on entering, as `record_receipt`.
        NotASessionError: an `AsyncSession` was passed to `with`, or a `Session` to
            `async with`.
        AutocommitError: on entering: the connection is in AUTOCOMMIT mode.
        HandlerTransactionError: on leaving, or from the caller's commit: the block
            ended the transaction or tried to, or caught a database error without a
            savepoint.
    """

    def __init__(
        self,
        session: S,
        message_id: MessageId,
        *,
        consumer: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        check_text("consumer", consumer)
        self._session: Any = session
        self._message_id = message_id
        self._consumer = consumer
        self._about = received(message_id, headers=headers)
        self._ends: Any = None

    def __enter__(self: "guard[Session] | guard[scoped_session[Session]]") -> bool:
        """Record the receipt; return False for a duplicate."""
        receipt = self._message_id, self._consumer
        with ExitStack() as ends:
            span = ends.enter_context(
                processing(tracing.tracer, [self._about], self._consumer)
            )
            is_new = record_receipt(self._session, *receipt)
            if is_new:
                ends.enter_context(protected(self._session, receipt))
            else:
                span.skipped()
            self._ends = ends.pop_all()
        return is_new

    def __exit__(self, *raised: Any) -> None:
        """Check that the block left the transaction open and able to commit."""
        self._ends.__exit__(*raised)

    async def __aenter__(
        self: "guard[AsyncSession] | guard[async_scoped_session[AsyncSession]]",
    ) -> bool:
        """See `__enter__`."""
        receipt = self._message_id, self._consumer
        async with AsyncExitStack() as ends:
            span = ends.enter_context(
                processing(tracing.tracer, [self._about], self._consumer)
            )
            is_new = await record_receipt_async(self._session, *receipt)
            if is_new:
                await ends.enter_async_context(protected(self._session, receipt))
            else:
                span.skipped()
            self._ends = ends.pop_all()
        return is_new

    async def __aexit__(self, *raised: Any) -> None:
        """See `__exit__`."""
        await self._ends.__aexit__(*raised)


def guard_of(session: Any, message: object, id: MessageId, consumer: str) -> Any:
    """Return the guard of a message, whose span also has what is known of it."""
    made = guard(session, id, consumer=consumer)
    made._about = received(id, message=message)
    return made


async def record_receipt_async(
    session: "AsyncSession | async_scoped_session[Any]",
    message_id: MessageId,
    consumer: str,
) -> bool:
    """Call `record_receipt` with an `AsyncSession`.

    Raises:
        NotASessionError: `session` isn't an `AsyncSession`.
        Exception: whatever `record_receipt` raises.
    """
    if is_async_scoped_session(session):
        session = session()
    if not is_async_session(session):
        raise NotASessionError(
            f"session {shorten(session)}: isn't a SQLAlchemy AsyncSession, which an "
            "async handler needs; pass one, or make the handler a plain function"
        )
    return await session.run_sync(record_receipt, message_id, consumer)
