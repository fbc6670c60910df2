"""`guard`: the receipt as a context manager, for where a decorator doesn't fit."""

from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from sqlalchemy.orm import Session, scoped_session

from inbox.idempotent import record_receipt_async
from inbox.receipt import MessageId, check_text, record_receipt
from inbox.transaction import lent

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
    leave the transaction's block, or roll back after the guard's block. Inside it, the
    session can't be committed, rolled back or closed.

    Raises:
        InvalidReceiptError: on entering, as `record_receipt`.
        NotASessionError: it is an `AsyncSession` in `with`, or the reverse.
        AutocommitError: on entering: the connection is in AUTOCOMMIT mode.
        TransactionControlError: the block ended the transaction, or tried to.
        UnexpectedRollbackError: on leaving, or from the caller's commit: a database
            error was caught without a savepoint.
    """

    def __init__(self, session: S, message_id: MessageId, *, consumer: str) -> None:
        check_text("consumer", consumer)
        self._session: object = session
        self._message_id = message_id
        self._consumer = consumer
        self._lent: lent | None = None

    def __enter__(self) -> bool:
        """Record the receipt; return False for a duplicate."""
        session = cast("Session", self._session)
        if not record_receipt(session, self._message_id, self._consumer):
            return False
        self._lent = lent(session)
        self._lent.__enter__()
        return True

    def __exit__(self, *exc_info: Any) -> None:
        """Check the transaction; its owner ends it."""
        if self._lent is not None:
            self._lent.__exit__(*exc_info)

    async def __aenter__(self) -> bool:
        """Do as `__enter__`."""
        session = cast("AsyncSession", self._session)
        if not await record_receipt_async(session, self._message_id, self._consumer):
            return False
        self._lent = lent(session)
        await self._lent.__aenter__()
        return True

    async def __aexit__(self, *exc_info: Any) -> None:
        """Do as `__exit__`."""
        if self._lent is not None:
            await self._lent.__aexit__(*exc_info)
