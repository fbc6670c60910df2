"""Run handlers on the connections of a psycopg pool, without SQLAlchemy.

The receipt is the first statement of a block `connection.transaction()`, in which
psycopg refuses commit() and rollback(). Whatever else a handler does to the transaction
shows in libpq's state at its end, and in the mark that `pillarbox.inbox.transaction`
describes.

Everything but the handlers' work runs in sessions, see `pools`.
"""

import asyncio
from collections.abc import Iterator
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    contextmanager,
    nullcontext,
)
from datetime import timedelta
from functools import cache
from typing import Any, Final, NoReturn, TypeAlias
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.transaction import OutOfOrderTransactionNesting
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import sessionmaker
from typing_extensions import override

from pillarbox.inbox.errors import (
    ConnectionLostError,
    HandlerTransactionError,
    InvalidReceiptError,
    TransactionEndedError,
)
from pillarbox.inbox.handlers.arguments import Arguments
from pillarbox.inbox.handlers.attempt import (
    Attempt,
    answered,
    awaited,
    execute,
    once_each,
)
from pillarbox.inbox.handlers.executor import Executor
from pillarbox.inbox.handlers.pools import (
    AnyPool,
    async_engine_of,
    engine_of,
    is_async_pool,
)
from pillarbox.inbox.handlers.routes import Handler, name_of
from pillarbox.inbox.handlers.signature import Takes, is_async
from pillarbox.inbox.idle import as_setting, decides, limiting
from pillarbox.inbox.receipt import insert_receipts, receipt_values, refusal_of_many
from pillarbox.inbox.transaction import HOLDS_RECEIPT
from pillarbox.outbox.errors import (
    ConfigError,
    DatabaseUnavailableError,
    one_line,
    shorten,
)
from pillarbox.outbox.message import Message
from pillarbox.outbox.tracing import causing

_Connection: TypeAlias = "psycopg.Connection[Any] | psycopg.AsyncConnection[Any]"

_AS_IT_FAILS: Final = nullcontext()
_MARK: Final = b"default_transaction_read_only"


class _Receipts:
    """The receipts of an attempt, in the transaction of a connection.

    Attributes:
        values: the parameters of `insert_receipts`.
        new: the messages that the handler must handle, after `recorded`.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._ids = [message.id for message in attempt.messages]
        self._messages = attempt.messages
        self.values = receipt_values(
            self._ids, attempt.consumer, as_setting(attempt.max_idle)
        )
        self.new: list[Message] = []
        self._is_marked = False

    def recorded(self, rows: list[tuple[UUID]], connection: _Connection) -> None:
        """Note which of the receipts are new."""
        # The application can have uuid loaded as text.
        new = {UUID(str(id)) for (id,) in rows}
        self.new = once_each(self._messages, new)
        self._is_marked = _has_mark(connection)

    def refused(self, error: Exception, connection: _Connection) -> NoReturn:
        """Raise the error for an INSERT, or for a transaction that can't begin."""
        if isinstance(error, InvalidReceiptError):
            raise error
        if (refused := refusal_of_many(error, self._ids)) is not None:
            raise refused from error
        connection.pgconn.finish()  # a new one may reach the primary
        raise DatabaseUnavailableError(one_line(error)) from error

    @contextmanager
    def protected(self, connection: _Connection) -> Iterator[None]:
        """Check that the handler, which the block runs, can't have lost its work.

        Raises:
            HandlerTransactionError: it ended the transaction, left the connection busy,
                or caught an error after which PostgreSQL would roll it back.
            ConnectionLostError: the connection is lost.
        """
        cause = causing(connection, self._ids[0]) if len(self._ids) == 1 else None
        try:
            with cause or nullcontext():
                yield
        except psycopg.Rollback as error:
            # The block connection.transaction() would take it for an answer.
            raise HandlerTransactionError.by_call("Rollback") from error
        except BaseException as error:
            is_lost = connection.broken
            _close_if_busy(connection)
            if isinstance(error, Exception):
                if is_lost and not decides(error):
                    raise ConnectionLostError(error) from error
                if self._was_ended(connection):
                    raise TransactionEndedError from error
            raise
        if _close_if_busy(connection):
            raise HandlerTransactionError.by_open_block()
        if connection.broken:
            raise ConnectionLostError
        if connection.closed:
            raise HandlerTransactionError.by_call("close()")
        if self._was_ended(connection):
            raise TransactionEndedError
        if connection.info.transaction_status is TransactionStatus.INERROR:
            raise HandlerTransactionError.by_error(None)

    def _was_ended(self, connection: _Connection) -> bool:
        status = connection.info.transaction_status
        if status is TransactionStatus.INTRANS:
            is_lost = self._is_marked and not _has_mark(connection)
            return is_lost and not _holds_receipt(connection)
        return status is TransactionStatus.IDLE


def _check_committed(connection: _Connection) -> None:
    """Check that the end of the block has committed.

    A task that an earlier handler left behind can have begun a transaction on the
    connection: then the block was only a savepoint in it.
    """
    if connection.info.transaction_status is not TransactionStatus.IDLE:
        raise DatabaseUnavailableError(
            "nothing was committed: a task or thread that the handler started is"
            " still using its connection; let it end before the handler returns"
        )


def _close_if_busy(connection: _Connection) -> bool:
    """Close a connection on which COMMIT would wait forever; return whether it was."""
    info = connection.info
    is_busy = info.transaction_status is TransactionStatus.ACTIVE or bool(
        info.pipeline_status
    )
    if is_busy:
        connection.pgconn.finish()
    return is_busy


class PoolExecutor(Executor):
    """Runs handlers with connections of a psycopg pool of their kind."""

    def __init__(
        self,
        pool: AnyPool,
        consumer: str,
        max_in_flight: int,
        max_idle: timedelta | None,
    ) -> None:
        self._pool: Any = pool
        self._has_opened = False
        sessions: dict[str, Any]
        if is_async_pool(pool):
            from sqlalchemy.ext.asyncio import async_sessionmaker

            self._engine: Any = async_engine_of(pool)
            sessions = {"coroutines": async_sessionmaker(self._engine)}
        else:
            self._engine = engine_of(pool)
            sessions = {"threads": sessionmaker(self._engine)}
        super().__init__(consumer, max_in_flight, max_idle, **sessions)

    @override
    def check(self, handler: Handler, arguments: Arguments) -> None:
        """Refuse a handler of the other kind, and what needs a session."""
        name = name_of(handler)
        if is_async(handler) is not self.has_coroutines:
            kinds = ("a ConnectionPool", "def"), ("an AsyncConnectionPool", "async def")
            its_pool, write = kinds[self.has_coroutines]
            raise ConfigError(
                f"handler {name} can't use connections of {its_pool}: write {write},"
                " or pass the other kind of pool"
            )
        if arguments.takes is Takes.JOB or arguments.takes_session:
            raise ConfigError(
                f"handler {name}: takes a session or a job, but gets a pool's"
                " connection; annotate it with psycopg's Connection or"
                " AsyncConnection, or register it with a Consumer that has a session"
                " factory"
            )

    @override
    async def _attempt(
        self, attempt: Attempt, failing: AbstractContextManager[None] = _AS_IT_FAILS
    ) -> set[UUID]:
        receipts = _Receipts(attempt)

        async def begin() -> None:
            # Whatever the pool's `check` has begun, for example.
            await awaited(connection.rollback())
            transaction = connection.transaction()
            if self.has_coroutines:
                await stack.enter_async_context(transaction)
            else:
                stack.enter_context(transaction)
            cursor = await execute(connection, _statement(), receipts.values)
            receipts.recorded(await awaited(cursor.fetchall()), connection)

        try:
            await self.open()
            connection = await awaited(self._pool.getconn())
        except Exception as error:
            raise DatabaseUnavailableError(one_line(error)) from error
        try:
            async with AsyncExitStack() as stack:
                stack.enter_context(limiting(attempt.max_idle))
                try:
                    if self.has_coroutines:
                        await answered(begin(), self._max_idle)
                    else:
                        with self.questions.asked(connection):
                            await begin()
                except Exception as error:  # noqa: BLE001 (it is translated)
                    receipts.refused(error, connection)
                if new := receipts.new:
                    with receipts.protected(connection), failing:
                        await attempt.call(connection, new)
                    await attempt.settle(connection)
            _check_committed(connection)
        except OutOfOrderTransactionNesting as error:
            raise _error_of(error) from None
        finally:
            await awaited(self._pool.putconn(connection))
        return {message.id for message in receipts.new}

    _attempt_async = _attempt

    @override
    async def open(self) -> None:
        """Open the pool if nobody has: once closed, it can't be opened again."""
        if not self._pool.closed:
            return
        try:
            await awaited(self._pool.open())
        except psycopg.OperationalError as error:
            raise ConfigError(
                f"sessions {shorten(self._pool)}: {error}; create another pool"
            ) from error
        self._has_opened = True

    @override
    async def close(self) -> None:
        """Close the connections of its own, and the pool that it has opened."""
        await super().close()
        if self.has_coroutines:
            await self._engine.dispose()
            if self._has_opened:
                await self._pool.close()
        else:
            self._engine.dispose()
            if self._has_opened:
                await asyncio.to_thread(self._pool.close)


def _error_of(error: OutOfOrderTransactionNesting) -> BaseException:
    """Return what a handler raised that left a transaction() open."""
    return error.__context__ or HandlerTransactionError.by_open_block()


def _has_mark(connection: _Connection) -> bool:
    return connection.pgconn.parameter_status(_MARK) == b"on"


def _holds_receipt(connection: _Connection) -> bool:
    # Without await, in a check that also runs in threads: it is rare and short.
    result = connection.pgconn.exec_(HOLDS_RECEIPT.encode())
    return result.get_value(0, 0) == b"t"


@cache
def _statement() -> bytes:
    compiled = insert_receipts().compile(dialect=postgresql.psycopg.dialect())  # type: ignore[no-untyped-call]
    return str(compiled).encode()
