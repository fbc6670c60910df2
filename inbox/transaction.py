"""A handler's transaction, which only the caller of the handler can end.

Receipt and effects commit together, after the handler has returned. What a handler does
that would break this is refused, or found before the commit:

    AUTOCOMMIT, a second connection      ──▶ refused at the receipt, or at the
    that can write                           connection's first use
    commit(), session or connection      ──▶ refused at the call, which rolls back by
                                             closing the driver's connection
    rollback() or close() of either      ──▶ refused at the next statement and at the
                                             return: nothing is committed
    a database error without a savepoint ──▶ refused at the return, and at the commit
    COMMIT or ROLLBACK as SQL            ──▶ found at the next statement, at the return
                                             or the error, and at the commit

SQLAlchemy's events call the checks. The last one runs directly before COMMIT is sent,
whichever code commits, and after all statements that the commit still executes.

With psycopg and psycopg2, reading the state of the transaction takes no round trip:
libpq keeps it. asyncpg only knows whether there is a transaction, so a statement asks
the server, but only after a database error or if the mark described below is lost.

After a COMMIT or ROLLBACK, a driver begins a new transaction with the next statement,
and its state looks the same as before. So the statement that inserts a receipt also
sets default_transaction_read_only for its transaction. This affects only transactions
that begin later, so this one can still write. The server reports the setting to the
driver, and reports it again when the setting ends with the transaction, or by RESET.
Then the lock on the table of receipts tells the two apart.
"""

from collections.abc import Callable, Hashable, Mapping
from types import TracebackType
from typing import Any, Final, NoReturn, TypeAlias

from sqlalchemy import (
    ColumnElement,
    Connection,
    CursorResult,
    Engine,
    Executable,
    and_,
    event,
    exists,
    false,
    func,
    literal_column,
    select,
    text,
)
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.pool import ConnectionPoolEntry

from pillarbox.inbox.connection import connection_of
from pillarbox.inbox.errors import (
    ConnectionLostError,
    HandlerTransactionError,
    TransactionEndedError,
)
from pillarbox.inbox.idle import LIMITS_IDLE, max_idle_of
from pillarbox.inbox.schema import foreign_receipt_table
from pillarbox.outbox.errors import ConfigError, sqlstate_of
from pillarbox.outbox.postgres.sql_files import load
from pillarbox.outbox.session import (
    AnySession,
    is_async_scoped_session,
    refuse_autocommit,
)
from pillarbox.outbox.writer import sync_session

Receipt: TypeAlias = tuple[Hashable, str]
"""The id of a message, and the consumer."""

_HELD: Final = "inbox_transaction"
_ROLLBACK: Final = "rollback() or close()"
_MARK: Final = "default_transaction_read_only"
_MARK_BYTES: Final = _MARK.encode()
_ABORTED: Final = "25P02"
# libpq's PQTRANS_IDLE, INTRANS, INERROR and UNKNOWN; asyncpg can't distinguish the
# second from the third.
_IDLE, _OPEN, _FAILED, _LOST, _OPEN_OR_FAILED = 0, 2, 3, 4, 5

MARKS: Final[ColumnElement[bool]] = and_(
    func.set_config(
        literal_column(f"'{_MARK}'"), literal_column("'on'"), literal_column("true")
    ).is_not(None),
    LIMITS_IDLE,
)
"""A condition that is always true; it marks the transaction until its end, and limits
its idle time."""
_BEGIN: Final = select(MARKS)
_BEGIN_JOB: Final = _BEGIN.where(
    ~exists().select_from(foreign_receipt_table).where(false())
)
"""It only locks the table, as a receipt does."""
HOLDS_RECEIPT: Final = load("inbox", "holds_receipt")
"""The query that tells the end of a transaction from a RESET, without the mark."""


class Held:
    """A transaction that commits together with a receipt or a job.

    Attributes:
        connection: that of the receipt, to which the session's flushes go.
        handled: the receipts whose handlers are running.
        depth: the number of handlers that are running in it.
        caught: the name and SQLSTATE of its last database error.
        lost: the error with which its connection was lost.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.handled: set[Receipt] = set()
        self.depth = 0
        self.caught: str | None = None
        self.lost: Exception | None = None
        self._transaction: Any = connection.get_transaction()
        self._driver: Any = connection.connection.driver_connection
        self._is_begun = False
        self._limit: dict[str, Any] = {}
        self._reads_mark: Callable[[], bool] | None = None
        self._refused: Exception | None = None
        self._was_ended = False

    @property
    def is_open(self) -> bool:
        """Whether SQLAlchemy has neither ended it nor lost its connection."""
        connection = self.connection
        return (
            self._transaction.is_active
            and connection.get_transaction() is self._transaction
            and not connection.invalidated
        )

    def execute(
        self, statement: Executable, values: Mapping[str, Any], **options: Any
    ) -> CursorResult[Any]:
        """Execute a statement that contains `MARKS`.

        Bypasses the session, which would look up the connection again.
        """
        self._limit = {"max_idle": values["max_idle"]}
        result = self.connection.execute(statement, values, execution_options=options)
        self._is_begun = True
        # Inside a savepoint the mark can't be relied on: a rollback to the savepoint,
        # which is allowed, also undoes the mark.
        if not self.connection.in_nested_transaction():
            reads_mark = _mark_reader(self._driver)
            self._reads_mark = reads_mark if reads_mark() else None
        return result

    def join(self, other: Connection) -> None:
        """Let the session use another connection, if it can only read.

        Raises:
            ConfigError: it can write, so that effects could commit without the receipt.
                The transaction can't be committed any more.
        """
        if other is self.connection or not _can_write(other):
            return
        _attach(other, self)  # which of the two is committed first is a coincidence
        self._refused = ConfigError(
            "the session would write through two connections, which commit"
            f" separately: {_name_of(self.connection)} and {_name_of(other)}; use a"
            " session factory with one engine, or make the second engine read-only"
            " with default_transaction_read_only=on"
        )
        raise self._refused

    def refuse(self, call: str) -> NoReturn:
        """Refuse what a handler did or wants to do, and remember it."""
        if self.was_ended():
            raise TransactionEndedError
        self._refused = HandlerTransactionError.by_call(call)
        raise self._refused

    def was_ended(self) -> bool:
        """Return whether the driver shows that it was ended bypassing SQLAlchemy."""
        if self._is_begun and self.is_open:
            status = _status(self._driver)
            self._was_ended |= status == _IDLE or (
                status == _OPEN and self._has_lost_mark() and not self._marks_again()
            )
        return self._was_ended

    def check_statement(self) -> None:
        """Refuse a statement that would be lost, or be committed on its own.

        Raises:
            HandlerTransactionError: it was ended.
        """
        if not self.is_open:
            if self.depth:
                self.refuse(_ROLLBACK)
        elif self.was_ended():
            raise TransactionEndedError

    def check(self) -> None:
        """Check that it is still open, and that PostgreSQL would commit it.

        Raises:
            HandlerTransactionError: it was ended, or it was refused to end it, or
                PostgreSQL would turn its COMMIT into a ROLLBACK.
            ConnectionLostError: its connection was lost.
            ConfigError: see `join`.
        """
        if self.was_ended():
            if self.is_open:
                self.connection.invalidate()  # nobody knows what was done to it
            raise TransactionEndedError
        if self.lost is not None:  # the handler may have caught it
            raise ConnectionLostError(self.lost) from self.lost
        if self._refused is not None:
            raise self._refused
        if self.is_open:
            self._check_server()
        elif self.caught is not None:  # a failed flush also rolls back
            raise HandlerTransactionError.by_error(self.caught)
        else:
            self.refuse(_ROLLBACK)

    def _check_server(self) -> None:
        status, is_lost = _status(self._driver), self._has_lost_mark()
        # A database error also removes the mark.
        if status == _OPEN_OR_FAILED and (is_lost or self.caught is not None):
            status = _FAILED if _is_aborted(self.connection) else _OPEN
        if status == _FAILED:
            raise HandlerTransactionError.by_error(self.caught)
        self.caught = None  # a savepoint was rolled back
        if status == _OPEN and is_lost and not self._marks_again():
            self._was_ended = True
            raise TransactionEndedError

    def _marks_again(self) -> bool:
        """Mark the transaction again if it lost the mark to RESET, not to its end."""
        self._reads_mark = None
        if not self.connection.execute(text(HOLDS_RECEIPT)).scalar():
            return False
        self.execute(_BEGIN, self._limit)
        return True

    def _has_lost_mark(self) -> bool:
        return self._reads_mark is not None and not self._reads_mark()


def hold(session: Session) -> Held:
    """Return a session's transaction before a receipt or a job becomes part of it.

    Raises:
        AutocommitError: the connection is in AUTOCOMMIT mode.
        ConfigError: as `connection_of` and `Held.join`.
    """
    # Asked each time, because only this sends the SAVEPOINT of `begin_nested()`.
    connection = connection_of(session)
    held = _held_on(connection)
    if held is None or not held.is_open:
        refuse_autocommit(connection, "the receipt")
        held = Held(connection)
        _attach(connection, held)
    session.info[_HELD] = held
    # Those that the session used before; SQLAlchemy has no other way to list them.
    connections: Any = vars(session.get_transaction())["_connections"]
    for other, *_ in connections.values():
        held.join(other)
    return held


def begin_held(session: Session) -> None:
    """Hold and mark a session's transaction; limit its idle time if a limit is set."""
    hold(session).execute(_BEGIN_JOB, {"max_idle": max_idle_of(session)})


class protected:  # noqa: N801 (reads as a statement: with protected(…))
    """Keep a handler, which the block runs, from ending its transaction.

    Call `hold` first. Use `async with` for an `AsyncSession`.

    Args:
        receipts: those that the handler's end makes valid; it can't record them itself.

    Raises:
        HandlerTransactionError: at the end of the block, as `Held.check`. If the block
            itself raises, only if effects may be committed, with the block's error as
            its cause.
    """

    def __init__(self, session: AnySession, *receipts: Receipt) -> None:
        # A scoped session has no `run_sync` of its own.
        self._async: Any = session() if is_async_scoped_session(session) else session
        self._session = sync_session(session)
        self._root: SessionTransaction | None = self._session.get_transaction()
        self._savepoint = self._session.get_nested_transaction()
        self._held: Held = self._session.info[_HELD]
        self._receipts = receipts

    def __enter__(self) -> None:
        """Refuse to commit from now on."""
        self._held.depth += 1
        self._held.handled.update(self._receipts)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Allow it again, and check that the block left the transaction intact."""
        self._end()
        if isinstance(error, Exception | None):
            self._check(self._session, error)

    async def __aenter__(self) -> None:
        """See `__enter__`."""
        self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """See `__exit__`."""
        self._end()
        if isinstance(error, Exception | None):  # a cancellation must stay one
            await self._async.run_sync(self._check, error)

    def _end(self) -> None:
        self._held.depth -= 1
        self._held.handled.difference_update(self._receipts)

    def _check(self, session: Session, error: Exception | None) -> None:
        held = self._held
        try:
            held.check()
            if session.get_transaction() is not self._root:
                held.refuse(_ROLLBACK)
            if self._savepoint is not None and not self._savepoint.is_active:
                held.refuse("the end of the savepoint around the receipt")
            if error is None:
                self._release_left_open(session)
                if isinstance(session.bind, Connection):
                    session.flush()  # its owner commits, and doesn't know the session
                    held.check()
        except TransactionEndedError as ended:
            if not isinstance(error, TransactionEndedError):
                raise ended from error
        except Exception:
            if error is None:  # otherwise the block's own error says more
                raise

    def _release_left_open(self, session: Session) -> None:
        # A later rollback to it would keep the receipt and lose the effects.
        while (open_ := session.get_nested_transaction()) is not self._savepoint:
            assert open_ is not None
            open_.commit()


@event.listens_for(Session, "after_begin")
def _join(session: Session, _: SessionTransaction, connection: Connection) -> None:
    # Runs at every begin in the process; usually costs one dictionary lookup.
    held: Held | None = session.info.get(_HELD)
    if held is None or held.connection is connection:
        return
    if held.is_open:
        held.join(connection)
    elif held.depth:
        _attach(connection, held)
        held.refuse(_ROLLBACK)


def _attach(connection: Connection, held: Held) -> None:
    connection.execution_options(**{_HELD: held})
    # Only engines with receipts have listeners, which make each statement a bit slower.
    engine = connection.engine
    if not event.contains(engine, "commit", _before_commit):
        event.listen(engine, "before_cursor_execute", _before_statement)
        event.listen(engine, "rollback", _before_rollback)
        event.listen(engine, "prepare_twophase", _before_commit)
        event.listen(engine, "commit", _before_commit)
        event.listen(engine, "checkin", _drop_busy)


def _drop_busy(_: object, record: ConnectionPoolEntry) -> None:
    # asyncpg can't roll back while a task that outlives its handler uses it.
    driver = record.driver_connection
    if driver is not None and _status(driver) not in (_IDLE, _LOST):
        record.invalidate()


def _before_statement(connection: Connection, *_: object) -> None:
    held = _held_on(connection)
    if held is not None:
        held.check_statement()


def _before_rollback(connection: Connection) -> None:
    held = _held_on(connection)
    if held is not None:
        held.was_ended()


def _before_commit(connection: Connection, *_: object) -> None:
    held = _held_on(connection)
    if held is None:
        return
    try:
        if held.depth:
            held.refuse("commit()")
        if held.is_open:
            held.check()
    except Exception:
        # SQLAlchemy regards its transaction as ended, and sends no ROLLBACK; and the
        # handler may have the driver's connection.
        connection.invalidate()
        raise


@event.listens_for(Engine, "handle_error")
def _record_error(context: ExceptionContext) -> None:
    held = None if context.connection is None else _held_on(context.connection)
    state = sqlstate_of(context.original_exception)
    # 25P02 only reports that an earlier statement failed.
    if held is None or (state == _ABORTED and held.caught is not None):
        return
    if context.is_disconnect and isinstance(context.original_exception, Exception):
        held.lost = context.original_exception
    name = type(context.sqlalchemy_exception or context.original_exception).__name__
    held.caught = f"{name}, SQLSTATE {state}" if state else name


def _held_on(connection: Connection) -> Held | None:
    held: Held | None = connection.get_execution_options().get(_HELD)
    return held


def _can_write(connection: Connection) -> bool:
    if connection.dialect.name != "postgresql":
        return True
    # On a replica, transactions are always read-only.
    found = connection.exec_driver_sql("SHOW transaction_read_only").scalar_one()
    return str(found) == "off"


def _is_aborted(connection: Connection) -> bool:
    try:
        connection.exec_driver_sql("SELECT 1")
    except DBAPIError as error:
        if sqlstate_of(error) != _ABORTED:
            raise
        return True
    return False


def _name_of(connection: Connection) -> str:
    return connection.engine.url.render_as_string(hide_password=True)


def _status(driver: Any) -> int:
    """Return libpq's state of the transaction, or `_OPEN_OR_FAILED`."""
    if hasattr(driver, "is_in_transaction"):  # asyncpg
        try:
            return _OPEN_OR_FAILED if driver.is_in_transaction() else _IDLE
        except AttributeError:
            return _LOST  # asyncpg has terminated the connection
    # psycopg's own `info` makes an object and an enum of each answer.
    known = driver.pgconn if hasattr(driver, "pgconn") else driver.info
    status: int = known.transaction_status
    if status == _LOST and driver.closed == 1 and not getattr(driver, "broken", False):
        return _IDLE  # the handler has closed it; psycopg2 has 2 for a lost connection
    return status


def _mark_reader(driver: Any) -> Callable[[], bool]:
    """Return a function that checks whether `MARKS` applies to the transaction.

    It always returns False if a pooler doesn't forward the server's reports.
    """
    if hasattr(driver, "get_settings"):  # asyncpg
        settings = driver.get_settings()
        return lambda: getattr(settings, _MARK, None) == "on"
    if (pgconn := getattr(driver, "pgconn", None)) is not None:  # psycopg
        return lambda: bool(pgconn.parameter_status(_MARK_BYTES) == b"on")
    return lambda: bool(driver.get_parameter_status(_MARK) == "on")  # psycopg2
