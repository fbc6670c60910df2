"""The connection to which a flush of a session writes.

A session may have several engines, and its own way to choose one for each statement: a
router sends what isn't a flush to a replica. Receipts commit with the effects only on
the connection that the effects are flushed to, so the inbox executes all its statements
there.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Mapper, Session
from sqlalchemy.orm import registry as orm_registry

from pillarbox.inbox.schema import metadata, receipt_table
from pillarbox.outbox.errors import ConfigError, shorten

T = TypeVar("T")


class _Receipt:
    """Stands for a receipt where SQLAlchemy asks what is to be flushed."""


_MAPPER: Final[Mapper[Any]] = orm_registry(metadata=metadata).map_imperatively(
    _Receipt, receipt_table
)
_DRIVERS: Final = ("psycopg", "psycopg2", "asyncpg")


def connection_of(session: Session, **options: Any) -> Connection:
    """Return the connection to which a flush of the session would write a receipt.

    Args:
        options: execution options, if the transaction hasn't begun yet.

    Raises:
        ConfigError: the session has no engine for the receipt, chooses one for each
            row, or has one whose driver the inbox doesn't support.
    """

    def connect() -> Connection:
        bind = session.get_bind(_MAPPER)
        if bind.dialect.driver not in _DRIVERS:
            raise ConfigError(
                "sessions: the inbox doesn't support the driver"
                f" {bind.dialect.driver!r} of {bind.dialect.name}; use one of"
                f" {', '.join(_DRIVERS)}"
            )
        # A test's session may join a transaction that has begun.
        is_joined = isinstance(bind, Connection) and bind.in_transaction()
        return session.connection(
            bind_arguments={"bind": bind},
            execution_options=None if is_joined else options or None,
        )

    return _in_flush(session, connect)


def bind_of(session: Session) -> Engine | Connection:
    """Return the bind of that connection without connecting; then close the session.

    Raises:
        ConfigError: as `connection_of`.
    """

    def ask() -> NoReturn:
        raise _Answer(session.get_bind(_MAPPER))

    try:
        return _in_flush(session, ask)
    except _Answer as answer:
        return answer.bind


class _Answer(Exception):  # noqa: N818 (an answer, no error)
    def __init__(self, bind: Engine | Connection) -> None:
        self.bind = bind


def _in_flush(session: Session, ask: Callable[[], T]) -> T:
    if session.connection_callable is not None:
        raise ConfigError(
            f"sessions {shorten(type(session))}: can't commit all effects of a"
            " message together, because it chooses a database for each row; pass a"
            " session factory for the inbox's database"
        )
    try:
        if getattr(session.get_bind, "__func__", None) is Session.get_bind:
            return ask()
        answers: list[T] = []

        def no_rows() -> Iterator[dict[str, Any]]:
            answers.append(ask())
            yield from ()

        # The public way to begin a flush: it inserts no rows, and the session's own
        # get_bind answers as for any other flush.
        session.bulk_insert_mappings(_MAPPER, no_rows())
        return answers[0]
    except UnboundExecutionError as error:
        raise ConfigError(
            "sessions: no engine is bound to the inbox's tables; give the session"
            " factory a default, sessionmaker(engine, binds=…), or also bind the"
            " tables of pillarbox.inbox.schema.metadata"
        ) from error
