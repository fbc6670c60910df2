"""A handler's transaction: only the caller of the handler ends it.

Receipt and effects commit together, after the handler has returned. Whatever a handler
could do against that is refused at the call, or found before the commit:

    AUTOCOMMIT                             ──▶ refused before the receipt
    session.commit(), rollback(), close()  ──▶ refused at the call, and at the return
    COMMIT or ROLLBACK as SQL              ──▶ the same
    a database error without a savepoint   ──▶ refused at the return, and at the commit
    COMMIT or ROLLBACK past SQLAlchemy     ──▶ found at the return, and at the commit

With psycopg and psycopg2 the state of the transaction costs no round trip: libpq knows
it. asyncpg only tells whether there is a transaction, so after a database error, and
only then, one statement asks the server.

A driver begins a new transaction with the first statement after a COMMIT or ROLLBACK,
and its state is the same as before. So the statement that inserts a receipt also sets
default_transaction_read_only for its transaction. That concerns only transactions that
begin later, so this one can still write. The server reports the setting to the driver,
and reports it again when it ends with the transaction.

A transaction that holds a receipt must not stay idle for long. A consumer that is
frozen, or whose host is gone, leaves its receipts uncommitted, and the process that
took over waits for them at the unique index. So the statement that inserts a receipt
also sets a time limit after which the server ends the session: the process that took
over proceeds, and the late one has no transaction left to commit.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Final, NoReturn
from weakref import WeakKeyDictionary

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Text,
    TextClause,
    and_,
    bindparam,
    cast,
    event,
    func,
    literal_column,
    select,
)
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, SessionTransaction

from inbox.errors import (
    TransactionControlError,
    TransactionEndedError,
    UnexpectedRollbackError,
)
from inbox.schema import receipt_table
from outbox.duration import exact_duration
from outbox.errors import ConfigError
from outbox.session import (
    AnySession,
    is_async_scoped_session,
    refuse_autocommit,
)
from outbox.writer import sync_session

_HELD: Final = "inbox.transaction"
# Not `begin`: SQLAlchemy itself refuses a second one.
_OF_SESSION: Final = ("commit", "rollback", "close", "reset", "invalidate", "prepare")
# PostgreSQL itself refuses a COMMIT in a function or a DO block.
_ENDING: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*"
    r"(commit|end|abort|prepare\s+transaction|"
    r"rollback(?!\s+(?:(?:work|transaction)\s+)?to\b))\b",
    re.IGNORECASE | re.DOTALL,
)
_MARK: Final = "default_transaction_read_only"
_MARK_BYTES: Final = _MARK.encode()
_UNMARKING: Final = re.compile(
    rf"{_MARK}|session\s+characteristics|reset\s+all", re.IGNORECASE
)
_IDLE: Final = 0  # libpq's PQTRANS_IDLE
_IN_ERROR: Final = 3  # libpq's PQTRANS_INERROR
_ABORTED: Final = "25P02"

_errors: Final[WeakKeyDictionary[Connection, str]] = WeakKeyDictionary()
"""The last database error of each connection: its name and SQLSTATE."""


class Held:
    """The transaction of a session, which commits together with a receipt or a job.

    Attributes:
        is_begun: whether a statement was executed in it, so the server has begun it.
        has_receipt: whether a new receipt was recorded in it.
    """

    __slots__ = (
        "_depth",
        "_reads_mark",
        "_refused",
        "_replaced",
        "_root",
        "_session",
        "connection",
        "has_receipt",
        "is_begun",
    )

    def __init__(
        self, session: Session, root: SessionTransaction, connection: Connection
    ) -> None:
        self.connection = connection
        self.is_begun = False
        self.has_receipt = False
        self._session = session
        self._root = root
        self._depth = 0
        self._reads_mark: Callable[[], bool] | None = None
        self._refused: TransactionControlError | None = None
        self._replaced: list[tuple[dict[str, Any], Iterable[str], dict[str, Any]]] = []

    @property
    def is_current(self) -> bool:
        """Whether the session is still in this transaction."""
        return self._session.get_transaction() is self._root

    @property
    def asks_server(self) -> bool:
        """Whether a check has to ask the server."""
        return (
            not self.connection.closed
            and not self.connection.invalidated
            and (self.connection in _errors or self._has_lost_mark)
            and _status(self.connection) is None
        )

    @property
    def _has_lost_mark(self) -> bool:
        return self._reads_mark is not None and not self._reads_mark()

    def begun(self) -> None:
        """Note that a statement with `MARKS` was executed in it."""
        self.is_begun = True
        # Whoever rolls back to a savepoint that was set before it undoes the mark, and
        # may do so.
        if not self.connection.in_nested_transaction():
            reads_mark = _mark_reader(self.connection)
            self._reads_mark = reads_mark if reads_mark() else None

    def lend(self) -> None:
        """Refuse everything that would end the transaction, from now on."""
        self._depth += 1
        if self._depth > 1:
            return
        refuse = self.refuse
        self._replace(
            self._session,
            {name: partial(refuse, f"session.{name}()") for name in _OF_SESSION},
        )
        self._replace(
            self.connection,
            {
                "commit": partial(refuse, "connection.commit()"),
                "rollback": partial(refuse, "connection.rollback()"),
                "close": self._close_connection,
                "execute": partial(self._execute, "execute"),
                "exec_driver_sql": partial(self._execute, "exec_driver_sql"),
            },
        )

    def _replace(self, of: object, methods: Mapping[str, Callable[..., Any]]) -> None:
        known = vars(of)
        was = {name: known[name] for name in methods if name in known}
        self._replaced.append((known, methods, was))
        known.update(methods)

    def take_back(self) -> None:
        """Allow the owner to end the transaction again."""
        self._depth -= 1
        if self._depth:
            return
        for known, methods, was in self._replaced:
            for name in methods:
                known.pop(name, None)
            known.update(was)
        self._replaced.clear()

    def refuse(self, call: str, *_: object, **__: object) -> NoReturn:
        """Refuse a call of the handler, and remember it."""
        self._refused = TransactionControlError(call)
        raise self._refused

    def _execute(self, name: str, statement: Any, *rest: Any, **options: Any) -> Any:
        said = statement.text if isinstance(statement, TextClause) else statement
        if isinstance(said, str):
            if found := _ENDING.match(said):
                self.refuse(f"{found[1].upper()} as SQL")
            if self._reads_mark is not None and _UNMARKING.search(said):
                self._reads_mark = None
        execute = getattr(type(self.connection), name)
        return execute(self.connection, statement, *rest, **options)

    def _close_connection(self) -> None:
        if self.is_current:
            self.refuse("connection.close()")
        # The transaction was ended past the session, which now releases the connection.
        type(self.connection).close(self.connection)

    def check(self) -> None:
        """Check that the handler left the transaction open and able to commit.

        Raises:
            TransactionControlError: a call that ends it was refused, and the handler
                caught the error.
            TransactionEndedError: it was ended all the same.
            UnexpectedRollbackError: PostgreSQL would turn its COMMIT into a ROLLBACK.
        """
        if self._refused is not None:
            raise self._refused
        if not self.is_current:
            raise TransactionEndedError
        connection = self.connection
        if self._was_rolled_back:
            raise UnexpectedRollbackError(_errors.get(connection))
        if connection.closed or not connection.in_transaction():
            raise TransactionEndedError
        status = _status(connection)
        if self.is_begun and not _is_in_transaction(connection, status):
            raise TransactionEndedError
        self._check_mark(status)

    @property
    def _was_rolled_back(self) -> bool:
        """Whether a failed flush or a lost connection has already rolled it back."""
        return not self._session.is_active or self.connection.invalidated

    def check_commit(self) -> None:
        """Check that its owner may commit now.

        Raises:
            TransactionControlError: it is lent to a handler.
            TransactionEndedError: it was ended, and this is another one.
            UnexpectedRollbackError: it would roll back.
        """
        if self._depth:
            self.refuse("transaction.commit()")
        connection = self.connection
        if self._was_rolled_back:
            raise UnexpectedRollbackError(_errors.get(connection))
        # If it is closed, the transaction was ended, which is detected elsewhere.
        if not connection.closed:
            self._check_mark(_status(connection))

    def _check_mark(self, status: int | None) -> None:
        # A database error removes the mark, too.
        is_lost = self._has_lost_mark
        if _is_failed(self.connection, status, is_suspect=is_lost):
            raise UnexpectedRollbackError(_errors.get(self.connection))
        if is_lost:
            raise TransactionEndedError


def hold(session: Session) -> Held:
    """Remember a session's transaction, before a receipt or a job becomes part of it.

    Raises:
        AutocommitError: there would be no transaction.
    """
    held: Held | None = session.info.get(_HELD)
    if held is not None and held.is_current:
        return held
    connection = session.connection(bind_arguments={"clause": receipt_table})
    refuse_autocommit(connection, "the receipt")
    root = session.get_transaction()
    assert root is not None  # the connection is part of it
    held = session.info[_HELD] = Held(session, root, connection)
    return held


class lent:  # noqa: N801 (reads as a statement: with lent(…))
    """Lend the transaction of a session to a handler for the block.

    Call `hold` before. Use `async with` for an `AsyncSession`.

    Raises:
        TransactionControlError, TransactionEndedError, UnexpectedRollbackError: at the
            end of the block, unless it raises something itself; as `Held.check`.
    """

    def __init__(self, session: AnySession) -> None:
        # A scoped session has no `run_sync` of its own.
        self._session: Any = session() if is_async_scoped_session(session) else session
        self._held: Held = sync_session(session).info[_HELD]

    def __enter__(self) -> None:
        """Refuse everything that would end the transaction, from now on."""
        self._held.lend()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Take the transaction back, and check how the handler left it."""
        self._held.take_back()
        if kind is None:
            self._held.check()

    async def __aenter__(self) -> None:
        """Do as `__enter__`."""
        self._held.lend()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Do as `__exit__`."""
        self._held.take_back()
        if kind is not None:
            return
        if self._held.asks_server:
            await self._session.run_sync(self._check)
        else:
            self._held.check()

    def _check(self, _: Session) -> None:
        self._held.check()


@event.listens_for(Session, "before_commit")
def _check_commit(session: Session) -> None:
    # Every commit of the process runs this, at the cost of one dictionary lookup.
    held: Held | None = session.info.get(_HELD)
    if held is None or session.in_nested_transaction():
        return
    if held.is_current:
        held.check_commit()
    del session.info[_HELD]


@event.listens_for(Engine, "handle_error")
def _note_error(context: ExceptionContext) -> None:
    if context.connection is None:
        return
    state = getattr(context.original_exception, "sqlstate", None) or getattr(
        context.original_exception, "pgcode", None
    )
    if state == _ABORTED and context.connection in _errors:
        return  # it only says that there was an earlier error
    name = type(context.sqlalchemy_exception or context.original_exception).__name__
    _errors[context.connection] = f"{name}, SQLSTATE {state}" if state else name


def _is_failed(connection: Connection, status: int | None, *, is_suspect: bool) -> bool:
    if status is not None:
        return status == _IN_ERROR
    if connection not in _errors and not is_suspect:
        return False
    try:
        connection.exec_driver_sql("SELECT 1")
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != _ABORTED:
            raise
        return True
    _errors.pop(connection, None)  # a savepoint was rolled back
    return False


def _is_in_transaction(connection: Connection, status: int | None) -> bool:
    if status is not None:
        return status != _IDLE
    ask: Callable[[], bool] | None = getattr(
        connection.connection.driver_connection, "is_in_transaction", None
    )
    return ask is None or ask()


def _status(connection: Connection) -> int | None:
    """Return libpq's state of the transaction; None for other drivers."""
    info = getattr(connection.connection.driver_connection, "info", None)
    status: int | None = getattr(info, "transaction_status", None)
    return status


def _mark_reader(connection: Connection) -> Callable[[], bool]:
    """Return a function that tells whether `MARKS` applies to the transaction.

    It never does if a pooler keeps the server's reports to itself.
    """
    driver: Any = connection.connection.driver_connection
    if (pgconn := getattr(driver, "pgconn", None)) is not None:  # psycopg
        return lambda: bool(pgconn.parameter_status(_MARK_BYTES) == b"on")
    if (ask := getattr(driver, "get_parameter_status", None)) is not None:  # psycopg2
        return lambda: bool(ask(_MARK) == "on")
    if hasattr(driver, "get_settings"):  # asyncpg
        settings = driver.get_settings()
        return lambda: getattr(settings, _MARK, None) == "on"
    return lambda: False


MARKS: Final[ColumnElement[bool]] = func.set_config(
    literal_column(f"'{_MARK}'"), literal_column("'on'"), literal_column("true")
).is_not(None)
"""A condition that is always true, and marks the transaction until it ends."""

DEFAULT_MAX_IDLE: Final = timedelta(seconds=60)
_LEAST: Final = timedelta(seconds=1)
_MOST: Final = timedelta(days=24)  # PostgreSQL counts milliseconds in 32 bits
_LIMIT: Final = "inbox.max_idle"

LIMITS_IDLE: Final[ColumnElement[bool]] = func.set_config(
    literal_column("'idle_in_transaction_session_timeout'"),
    cast(bindparam("max_idle", type_=Text()), Text),
    literal_column("true"),
).is_not(None)
"""A condition that is always true, and applies `max_idle` to the transaction."""
_LIMIT_NOW: Final = select(LIMITS_IDLE)
_LIMIT_AND_MARK: Final = select(and_(LIMITS_IDLE, MARKS))


def check_max_idle(max_idle: timedelta | None) -> None:
    """Refuse a limit that PostgreSQL doesn't accept, or that no handler could keep.

    Raises:
        ConfigError: it is below a second or above 24 days.
    """
    if max_idle is not None and not _LEAST <= max_idle <= _MOST:
        raise ConfigError(
            f"max_idle={exact_duration(max_idle)}: must be from 1s to 24d, or None"
        )


def limit_idle(session: AnySession, max_idle: timedelta | None) -> None:
    """Set how long a session may be idle in the transaction of a receipt."""
    if max_idle is not None:
        session.info[_LIMIT] = f"{max_idle // timedelta(milliseconds=1)}ms"


def limit_idle_now(session: Session) -> None:
    """Apply that limit to the current transaction, where no receipt does so."""
    max_idle = max_idle_of(session)
    if max_idle is not None:
        session.execute(_LIMIT_NOW, {"max_idle": max_idle})


def begin_held(session: Session) -> None:
    """Hold a session's transaction, and limit its idle time if there is a limit."""
    held = hold(session)
    max_idle = max_idle_of(session)
    if max_idle is not None:
        session.execute(_LIMIT_AND_MARK, {"max_idle": max_idle})
        held.begun()


def max_idle_of(session: AnySession) -> str | None:
    """Return the limit that was set, as PostgreSQL writes it; None if none was."""
    noted: str | None = session.info.get(_LIMIT)
    return noted
