"""A handler's transaction, which only the caller of the handler can end.

Receipt and effects commit together, after the handler has returned. Anything a handler
does that would break this is refused at the call, or detected before the commit:

    AUTOCOMMIT                             ──▶ refused before the receipt
    session.commit(), rollback(), close()  ──▶ refused at the call, and at the return
    COMMIT or ROLLBACK as SQL              ──▶ the same
    the commit of a transaction object     ──▶ refused directly before COMMIT is sent
    a database error without a savepoint   ──▶ refused at the return, and at the commit
    COMMIT or ROLLBACK outside SQLAlchemy  ──▶ detected at the next statement, at the
                                               return or the error, and at the commit

Whoever commits, and whatever the commit still executes (the flush, listeners of the
application), the last check runs directly before COMMIT is sent.

With psycopg and psycopg2, reading the state of the transaction takes no round trip:
libpq keeps it. asyncpg only tells whether there is a transaction, so a statement asks
the server, but only after a database error or if the mark described below is lost.

After a COMMIT or ROLLBACK, a driver begins a new transaction with the next statement,
and its state looks the same as before. So the statement that inserts a receipt also
sets default_transaction_read_only for its transaction. This affects only transactions
that begin later, so this one can still write. The server reports the setting to the
driver, and reports it again when the setting ends with the transaction.

A transaction that holds a receipt must not stay idle for long. A consumer that is
frozen, or whose host is gone, leaves its receipts uncommitted, and the process that
took over waits for them at the unique index. So the statement that inserts a receipt
also sets a time limit after which the server ends the session: the process that took
over proceeds, and the late process has no transaction left to commit.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Final, NoReturn, TypeAlias
from weakref import WeakKeyDictionary, ref

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    PoolProxiedConnection,
    Text,
    TextClause,
    Transaction,
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

from inbox.connection import connection_of
from inbox.errors import (
    TransactionControlError,
    TransactionEndedError,
    UnexpectedRollbackError,
)
from outbox.duration import exact_duration
from outbox.errors import ConfigError, OutboxError
from outbox.session import (
    AnySession,
    is_async_scoped_session,
    refuse_autocommit,
)
from outbox.writer import sync_session

Receipt: TypeAlias = tuple[Hashable, str]
"""The id of a message, and the consumer."""

_HELD: Final = "inbox.transaction"
_DO_COMMIT: Final = "do_commit"
# `begin` needs no entry: SQLAlchemy itself refuses a second call.
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
_IN_TRANSACTION: Final = 2  # libpq's PQTRANS_INTRANS
_IN_ERROR: Final = 3  # libpq's PQTRANS_INERROR
_LOST: Final = 4  # libpq's PQTRANS_UNKNOWN
_ABORTED: Final = "25P02"

_errors: Final[WeakKeyDictionary[Connection, str]] = WeakKeyDictionary()
"""The name and SQLSTATE of each connection's last database error."""


class Held:
    """A session's transaction, which commits together with a receipt or a job.

    Attributes:
        is_begun: whether a statement was executed in it, so the server has begun it.
        has_receipt: whether a new receipt was recorded in it.
        calls: the receipts whose handlers are running, each with the functions that it
            has let run, and the savepoints in which they were called.
        refused_receipt: one that must not be recorded in it.
    """

    __slots__ = (
        "_depth",
        "_is_borrowed",
        "_others",
        "_reads_mark",
        "_refused",
        "_replaced",
        "_root",
        "_second",
        "_session",
        "_transaction",
        "_was_ended",
        "calls",
        "connection",
        "has_receipt",
        "is_begun",
        "refused_receipt",
    )

    def __init__(
        self, session: Session, root: SessionTransaction, connection: Connection
    ) -> None:
        self.connection = connection
        self.is_begun = False
        self.has_receipt = False
        self.calls: dict[Receipt, dict[object, Sequence[SessionTransaction]]] = {}
        self.refused_receipt: Receipt | None = None
        self._session = session
        self._root = root
        self._transaction = connection.get_transaction()
        self._is_borrowed = isinstance(session.bind, Connection)
        self._depth = 0
        self._reads_mark: Callable[[], bool] | None = None
        self._refused: TransactionControlError | None = None
        self._second: ConfigError | None = None
        self._was_ended = False
        self._others: dict[Connection, Transaction | None] = {}
        self._replaced: list[tuple[dict[str, Any], Iterable[str], dict[str, Any]]] = []

    @property
    def is_current(self) -> bool:
        """Whether the session is still in this transaction."""
        return self._session.get_transaction() is self._root

    @property
    def asks_server(self) -> bool:
        """Whether a check has to ask the server."""
        return any(other in _errors for other in self._others) or (
            not self.connection.closed
            and not self.connection.invalidated
            and _status(self.connection) is None
            and (self.connection in _errors or self._has_lost_mark)
        )

    def note_call(self, receipt: Receipt, function: object) -> None:
        """Record that a function was called for a receipt, unless it is undone."""
        savepoints = []
        transaction = self._session.get_nested_transaction()
        while transaction is not None:
            savepoints.append(transaction)
            transaction = transaction.parent
        self.calls[receipt][function] = savepoints

    def undo_calls(self, savepoint: SessionTransaction) -> None:
        """Forget the calls whose effects a rollback to a savepoint has undone."""
        for functions in self.calls.values():
            for function, savepoints in list(functions.items()):
                if savepoint in savepoints:
                    del functions[function]

    def join(self, other: Connection) -> None:
        """Also check a connection of the session to a replica or another database.

        Raises:
            AutocommitError: it is in AUTOCOMMIT mode.
            ConfigError: it can write to the same database, so that effects could commit
                without the receipt. The transaction can't be committed any more.
        """
        if other is self.connection or other in self._others:
            return
        self._others[other] = other.get_transaction()
        _check_before_commit(other, self)
        refuse_autocommit(other, "an effect")
        if _can_write(other) and _database_of(other) == _database_of(self.connection):
            self._second = ConfigError(
                "the session writes to one database through two connections, which "
                f"commit separately: it flushes to {_name_of(self.connection)}, and "
                f"executed this on {_name_of(other)}; use a session factory with one "
                "engine, or give the second a replica's URL or the setting "
                "default_transaction_read_only=on"
            )
            raise self._second

    @property
    def must_flush(self) -> bool:
        """Whether to flush when the handler returns, since no commit will.

        The connection's owner commits, and doesn't know the session.
        """
        session = self._session
        return (
            self._is_borrowed
            and session.is_active
            and bool(session.new or session.dirty or session.deleted)
        )

    def flush(self) -> None:
        """Execute what the session has not executed yet."""
        self._session.flush()

    @property
    def _has_lost_mark(self) -> bool:
        return self._reads_mark is not None and not self._reads_mark()

    def begun(self) -> None:
        """Record that a statement with `MARKS` was executed in the transaction."""
        self.is_begun = True
        # Inside a savepoint the mark can't be relied on: a rollback to the savepoint,
        # which is allowed, also undoes the mark.
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
                "scalar": partial(self._execute, "scalar"),
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
        if self._is_known_ended:
            # What the statement does would be lost, or committed on its own.
            self._was_ended = True
            raise TransactionEndedError
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
        # The transaction was ended outside the session, which releases the connection.
        type(self.connection).close(self.connection)

    def check(self) -> None:
        """Check that the handler left the transaction open and able to commit.

        Raises:
            TransactionControlError: a call to end it was refused, and the handler
                caught the error.
            TransactionEndedError: it was ended anyway.
            UnexpectedRollbackError: PostgreSQL would turn its COMMIT into a ROLLBACK.
        """
        if self._was_ended or self._is_known_ended:
            self._was_ended = True
            self._give_up_closed()
            raise TransactionEndedError
        if self._refused is not None:
            raise self._refused
        if not self.is_current:
            raise TransactionEndedError
        connection = self.connection
        if self._was_rolled_back:
            raise UnexpectedRollbackError(_errors.get(connection))
        if connection.closed or not connection.in_transaction():
            raise TransactionEndedError
        self._check_mark(_status(connection))
        self._check_others()

    def _check_others(self) -> None:
        if self._second is not None:
            raise self._second
        for other, transaction in self._others.items():
            if other.closed or other.get_transaction() is not transaction:
                continue
            refuse_autocommit(other, "an effect")
            is_lost = other.invalidated
            if is_lost or _is_failed(other, _status(other), is_suspect=False):
                raise UnexpectedRollbackError(_errors.get(other))

    def _give_up_closed(self) -> None:
        connection = self.connection
        if connection.closed or connection.invalidated:
            return
        driver: Any = connection.connection.driver_connection
        is_closed = (
            driver.is_closed() if hasattr(driver, "is_closed") else driver.closed
        )
        if is_closed:
            # A ROLLBACK would fail and hide the error; the pool needs another one.
            connection.invalidate()

    def check_failed(self, error: Exception) -> None:
        """Check that a handler that raised left the end of the transaction to us.

        Raises:
            TransactionEndedError: it didn't, so a part of its work may be committed.
        """
        if isinstance(error, TransactionEndedError):
            return
        try:
            self.check()
        except TransactionEndedError as ended:
            raise ended from error
        except Exception:  # noqa: BLE001 (the handler's own error says more)
            return

    @property
    def _is_known_ended(self) -> bool:
        """Whether the driver's state shows that it was ended, without a round trip.

        False after a failed flush or a lost connection, which say nothing about it.
        """
        connection = self.connection
        if (
            not self.is_begun
            or connection.closed
            or self._was_rolled_back
            or not connection.in_transaction()
        ):
            return False
        if _is_closed_by_client(connection):
            return True
        status = _status(connection)
        if not _is_in_transaction(connection, status):
            return True
        return status == _IN_TRANSACTION and self._has_lost_mark

    @property
    def _was_rolled_back(self) -> bool:
        """Whether a failed flush or a lost connection has already rolled it back."""
        return not self._session.is_active or self.connection.invalidated

    def check_commit(self) -> None:
        """Check that the transaction's owner can commit it.

        Raises:
            TransactionControlError: it is lent to a handler.
            TransactionEndedError: it was ended, and another one has begun.
            UnexpectedRollbackError: it would roll back.
        """
        if self._depth:
            self.refuse("transaction.commit()")
        connection = self.connection
        if self._was_rolled_back:
            raise UnexpectedRollbackError(_errors.get(connection))
        # A closed connection means an ended transaction, which is detected elsewhere.
        if not connection.closed:
            self._check_mark(_status(connection))
        self._check_others()

    def check_last(self, committing: Connection) -> None:
        """Check that PostgreSQL would commit it; call directly before COMMIT is sent.

        If the session has several connections, the first COMMIT checks all of them.

        Raises:
            TransactionControlError, TransactionEndedError, UnexpectedRollbackError: as
                `check_commit`. The transaction was rolled back.
        """
        connection = self.connection
        is_ours = connection.get_transaction() is self._transaction
        if not is_ours and committing is connection:
            return
        try:
            if self._depth:
                self.refuse("transaction.commit()")
            if is_ours and not connection.closed:
                self._check_mark(_status(connection))
            self._check_others()
        except Exception:
            # SQLAlchemy regards its transaction as ended, and sends no ROLLBACK.
            with suppress(Exception):
                committing.connection.rollback()
            raise
        if self._session.info.get(_HELD) is self:
            del self._session.info[_HELD]

    def _check_mark(self, status: int | None) -> None:
        if status == _LOST:
            return  # the next statement fails
        # A database error also removes the mark.
        is_lost = self._has_lost_mark
        if _is_failed(self.connection, status, is_suspect=is_lost):
            raise UnexpectedRollbackError(_errors.get(self.connection))
        if is_lost:
            raise TransactionEndedError


def hold(session: Session) -> Held:
    """Remember a session's transaction before a receipt or a job becomes part of it.

    Raises:
        AutocommitError: the connection is in AUTOCOMMIT mode.
        ConfigError: as `connection_of` and `Held.join`.
    """
    held: Held | None = session.info.get(_HELD)
    if held is not None and held.is_current:
        return held
    connection = connection_of(session)
    refuse_autocommit(connection, "the receipt")
    root = session.get_transaction()
    assert root is not None  # the connection is part of it
    held = session.info[_HELD] = Held(session, root, connection)
    _check_before_commit(connection, held)
    # Those that the session used before; SQLAlchemy has no other way to list them.
    for other, *_ in getattr(root, "_connections", {}).values():
        held.join(other)
    return held


class lent:  # noqa: N801 (reads as a statement: with lent(…))
    """Lend the transaction of a session to a handler for the block.

    Call `hold` first. Use `async with` for an `AsyncSession`.

    Raises:
        TransactionControlError, TransactionEndedError, UnexpectedRollbackError: at the
            end of the block, as `Held.check`. If the block itself raises, only
            `TransactionEndedError`, with the block's error as its cause.
    """

    def __init__(self, session: AnySession) -> None:
        # A scoped session has no `run_sync` of its own.
        self._session: Any = session() if is_async_scoped_session(session) else session
        self._held: Held = sync_session(session).info[_HELD]

    def __enter__(self) -> None:
        """Refuse everything that would end the transaction, from now on."""
        self._held.lend()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take the transaction back, and check that the handler left it intact."""
        self._held.take_back()
        self._check(error)

    async def __aenter__(self) -> None:
        """See `__enter__`."""
        self._held.lend()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """See `__exit__`."""
        self._held.take_back()
        held = self._held
        must_wait = held.asks_server or (error is None and held.must_flush)
        if must_wait and isinstance(error, Exception | None):
            await self._session.run_sync(lambda _: self._check(error))
        else:
            self._check(error)

    def _check(self, error: BaseException | None) -> None:
        if error is None:
            if self._held.must_flush:
                self._held.flush()
            self._held.check()
        elif isinstance(error, Exception):  # a cancellation must stay one
            self._held.check_failed(error)


@event.listens_for(Session, "before_commit")
def _check_commit(session: Session) -> None:
    # Runs at every commit in the process; usually costs one dictionary lookup.
    held: Held | None = session.info.get(_HELD)
    if held is None or session.in_nested_transaction():
        return
    if held.is_current:
        held.check_commit()
    else:
        del session.info[_HELD]


@event.listens_for(Session, "after_begin")
def _join(session: Session, _: SessionTransaction, connection: Connection) -> None:
    # Runs at every begin in the process; usually costs one dictionary lookup.
    held: Held | None = session.info.get(_HELD)
    if held is not None and held.is_current:
        held.join(connection)


@event.listens_for(Session, "after_soft_rollback")
def _undo_calls(session: Session, rolled_back: SessionTransaction) -> None:
    held: Held | None = session.info.get(_HELD)
    if held is not None:
        held.undo_calls(rolled_back)


def _check_before_commit(connection: Connection, held: Held) -> None:
    """Let `held.check_last` run directly before COMMIT is sent on a connection.

    SQLAlchemy's event "commit" would make each statement of every engine in the process
    look for listeners: 40 µs of a guarded transaction's 820.
    """
    vars(connection)[_HELD] = held
    connection.connection.info[_HELD] = ref(connection)
    dialect = connection.dialect
    if _DO_COMMIT not in vars(dialect):
        vars(dialect)[_DO_COMMIT] = partial(_commit_checked, dialect.do_commit)


def _commit_checked(send: Callable[[Any], None], committing: Any) -> None:
    """Check and commit: replaces `Dialect.do_commit` of an engine that has receipts."""
    if isinstance(committing, PoolProxiedConnection):
        noted: ref[Connection] | None = committing.info.pop(_HELD, None)
        connection = None if noted is None else noted()
        held: Held | None = (
            None if connection is None else vars(connection).pop(_HELD, None)
        )
        if connection is not None and held is not None:
            held.check_last(connection)
    send(committing)


@event.listens_for(Engine, "handle_error")
def _note_error(context: ExceptionContext) -> None:
    if context.connection is None or isinstance(
        context.original_exception, OutboxError
    ):
        return
    state = getattr(context.original_exception, "sqlstate", None) or getattr(
        context.original_exception, "pgcode", None
    )
    if state == _ABORTED and context.connection in _errors:
        return  # only reports that an earlier statement failed
    name = type(context.sqlalchemy_exception or context.original_exception).__name__
    _errors[context.connection] = f"{name}, SQLSTATE {state}" if state else name


def _can_write(connection: Connection) -> bool:
    if connection.dialect.name != "postgresql":
        return False
    # On a replica, transactions are always read-only.
    found = connection.exec_driver_sql("SHOW transaction_read_only").scalar_one()
    return str(found) == "off"


def _database_of(connection: Connection) -> Sequence[Any]:
    """Return what identifies a database, whatever the URL calls it."""
    return connection.exec_driver_sql(
        "SELECT pg_postmaster_start_time()::text, current_database()"
    ).one()


def _name_of(connection: Connection) -> str:
    return connection.engine.url.render_as_string(hide_password=True)


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


def _is_closed_by_client(connection: Connection) -> bool:
    """Return whether psycopg or psycopg2 closed the connection, as it was told to.

    False if the server or the network did.
    """
    driver: Any = connection.connection.driver_connection
    # psycopg2 says 2 if the connection was lost.
    return getattr(driver, "closed", 0) == 1 and not getattr(driver, "broken", False)


def _is_in_transaction(connection: Connection, status: int | None) -> bool:
    if status is not None:
        return status != _IDLE
    ask: Callable[[], bool] | None = getattr(
        connection.connection.driver_connection, "is_in_transaction", None
    )
    try:
        return ask is None or ask()
    except AttributeError:
        return True  # asyncpg has terminated the connection, and knows nothing


def _status(connection: Connection) -> int | None:
    """Return libpq's state of the transaction; None for other drivers."""
    info = getattr(connection.connection.driver_connection, "info", None)
    status: int | None = getattr(info, "transaction_status", None)
    return status


def _mark_reader(connection: Connection) -> Callable[[], bool]:
    """Return a function that checks whether `MARKS` applies to the transaction.

    It always returns False if a pooler doesn't forward the server's reports.
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
"""A condition that is always true; it marks the transaction until the end."""

DEFAULT_MAX_IDLE: Final = timedelta(seconds=60)
_LEAST: Final = timedelta(seconds=1)
_MOST: Final = timedelta(days=24)  # PostgreSQL counts milliseconds in 32 bits
_LIMIT: Final = "inbox.max_idle"

LIMITS_IDLE: Final[ColumnElement[bool]] = func.set_config(
    literal_column("'idle_in_transaction_session_timeout'"),
    cast(bindparam("max_idle", type_=Text()), Text),
    literal_column("true"),
).is_not(None)
"""A condition that is always true; it applies `max_idle` to the transaction."""
_LIMIT_NOW: Final = select(LIMITS_IDLE)
_MARK_ONLY: Final = select(MARKS)
_LIMIT_AND_MARK: Final = select(and_(LIMITS_IDLE, MARKS))


def check_max_idle(max_idle: timedelta | None) -> None:
    """Refuse a limit that PostgreSQL doesn't accept or that no handler could meet.

    Raises:
        ConfigError: it is below a second or above 24 days.
    """
    if max_idle is not None and not _LEAST <= max_idle <= _MOST:
        raise ConfigError(
            f"max_idle={exact_duration(max_idle)}: must be from 1s to 24d, or None"
        )


def limit_idle(session: AnySession, max_idle: timedelta | None) -> None:
    """Set how long a session can be idle in a transaction that holds a receipt."""
    if max_idle is not None:
        session.info[_LIMIT] = f"{max_idle // timedelta(milliseconds=1)}ms"


def limit_idle_now(session: Session) -> None:
    """Apply that limit to the current transaction, if no receipt applies it."""
    max_idle = max_idle_of(session)
    if max_idle is not None:
        connection_of(session).execute(_LIMIT_NOW, {"max_idle": max_idle})


def begin_held(session: Session) -> None:
    """Hold and mark a session's transaction; limit its idle time if a limit is set."""
    held = hold(session)
    max_idle = max_idle_of(session)
    if max_idle is None:
        held.connection.execute(_MARK_ONLY)
    else:
        held.connection.execute(_LIMIT_AND_MARK, {"max_idle": max_idle})
    held.begun()


def max_idle_of(session: AnySession) -> str | None:
    """Return the session's limit, as PostgreSQL writes it; None if it has none."""
    noted: str | None = session.info.get(_LIMIT)
    return noted
