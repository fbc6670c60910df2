"""`guard`: the receipt as a context manager, for code where a decorator doesn't fit."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from sqlalchemy.orm import Session, scoped_session

from inbox.idempotent import record_receipt_async
from inbox.processing import processing, received
from inbox.receipt import MessageId, check_text, record_receipt
from inbox.transaction import protected
from outbox import tracing
from outbox.tracing import Processing, Tracer

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
        self._session: object = session
        self._message_id = message_id
        self._consumer = consumer
        self._headers = headers
        self._protected: protected | None = None
        self._span: Processing | None = None
        self._ends: ExitStack | None = None

    def __enter__(self: "guard[Session] | guard[scoped_session[Session]]") -> bool:
        """Record the receipt; return False for a duplicate."""
        if tracing.tracer is None:
            return self._enter()
        with ExitStack() as ends:
            span = self._span = ends.enter_context(self._processing(tracing.tracer))
            if not (is_new := self._enter()):
                span.skipped()
            self._ends = ends.pop_all()
        return is_new

    def __exit__(self, *raised: Any) -> None:
        """Check that the block left the transaction open and able to commit."""
        if self._ends is None:
            self._exit(*raised)
            return
        with self._ends:
            self._record_error(raised[1])
            self._exit(*raised)

    async def __aenter__(
        self: "guard[AsyncSession] | guard[async_scoped_session[AsyncSession]]",
    ) -> bool:
        """See `__enter__`."""
        if tracing.tracer is None:
            return await self._enter_async()
        with ExitStack() as ends:
            span = self._span = ends.enter_context(self._processing(tracing.tracer))
            if not (is_new := await self._enter_async()):
                span.skipped()
            self._ends = ends.pop_all()
        return is_new

    async def __aexit__(self, *raised: Any) -> None:
        """See `__exit__`."""
        if self._ends is None:
            await self._exit_async(*raised)
            return
        with self._ends:
            self._record_error(raised[1])
            await self._exit_async(*raised)

    def _enter(self) -> bool:
        session = cast("Session", self._session)
        if not record_receipt(session, self._message_id, self._consumer):
            return False
        self._protected = protected(session, (self._message_id, self._consumer))
        self._protected.__enter__()
        return True

    def _exit(self, *raised: Any) -> None:
        if self._protected is not None:
            self._protected.__exit__(*raised)

    async def _enter_async(self) -> bool:
        session = cast("AsyncSession", self._session)
        if not await record_receipt_async(session, self._message_id, self._consumer):
            return False
        self._protected = protected(session, (self._message_id, self._consumer))
        await self._protected.__aenter__()
        return True

    async def _exit_async(self, *raised: Any) -> None:
        if self._protected is not None:
            await self._protected.__aexit__(*raised)

    def _processing(self, tracer: Tracer) -> AbstractContextManager[Processing]:
        known = received(self._message_id, headers=self._headers)
        return processing(tracer, [known], self._consumer)

    def _record_error(self, error: BaseException | None) -> None:
        if self._span is not None and error is not None:
            self._span.failed(error)
