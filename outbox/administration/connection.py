"""Connect for an administration command, and explain the database's errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Self, TypeAlias

import psycopg
from psycopg.rows import Row, TupleRow
from typing_extensions import override

from pillarbox.outbox.errors import DatabaseUnavailableError, UpkeepError, message_of
from pillarbox.outbox.postgres.connection import PIN_SESSION, conninfo
from pillarbox.outbox.postgres.pooler_check import refuse_pooler
from pillarbox.outbox.postgres.remedy import remedy_of
from pillarbox.outbox.url import without_password

AdministrationConnection: TypeAlias = "psycopg.Connection[TupleRow]"

# Connection lost, access denied, no such database, too many clients, shut down.
_AWAY: Final = ("08", "28", "3D", "53", "57P")
_RIGHTS: Final = (
    "connect as a member of pillarbox_monitor to read, of pillarbox_maintainer to run "
    "the upkeep, or of pillarbox_owner to change the policy"
)


class NotingCursor(psycopg.Cursor[Row]):
    """Notes in each error whose it is: a command may have opened several databases."""

    @override
    def execute(self, *args: Any, **options: Any) -> Self:
        """Execute a statement."""
        try:
            return super().execute(*args, **options)
        except psycopg.Error as error:
            error.add_note(address_of(self.connection))
            raise


def address_of(connection: "psycopg.Connection[Any]") -> str:
    """Return where a database is, for people."""
    return f"{connection.info.host}:{connection.info.port}/{connection.info.dbname}"


@contextmanager
def administration(
    url: str, *, application_name: str, rights: str = _RIGHTS, any_role: bool = False
) -> Iterator[AdministrationConnection]:
    """Open a connection in autocommit mode, for one command.

    Args:
        rights: what to do if a privilege is missing.
        any_role: as for `refuse_pooler`.

    Raises:
        DatabaseUnavailableError: the database is unreachable, or the connection was
            lost.
        PoolerError: the URL leads to a pooler in transaction mode.
        ConfigError: as for `refuse_superuser`.
        UpkeepError: a statement failed; the message names the remedy.
    """
    refuse_pooler(url, any_role=any_role)
    with (
        errors_explained(url, rights),
        psycopg.connect(
            conninfo(url, application_name=application_name),
            autocommit=True,
            cursor_factory=NotingCursor,
        ) as connection,
    ):
        connection.execute(PIN_SESSION)
        # Compiling a plan for many partitions would take seconds.
        connection.execute("SET jit = off")
        yield connection


@contextmanager
def errors_explained(url: str, rights: str = _RIGHTS) -> Iterator[None]:
    """Turn psycopg's errors in the block into errors that name the remedy.

    Raises:
        DatabaseUnavailableError, UpkeepError: as for `administration`.
    """
    try:
        yield
    except psycopg.Error as error:
        where = next(iter(getattr(error, "__notes__", ())), None)
        if error.sqlstate is None or error.sqlstate.startswith(_AWAY):
            raise DatabaseUnavailableError(
                f"can't reach the database {where or without_password(url)}: "
                f"{message_of(error)}"
            ) from error
        text = f"{error.diag.message_primary or error}; {_remedy(error, rights)}"
        raise UpkeepError(f"{where}: {text}" if where else text) from error


def _remedy(error: psycopg.Error, rights: str) -> str:
    if error.diag.message_hint:
        return error.diag.message_hint
    match error:
        case psycopg.errors.InsufficientPrivilege():
            return remedy_of(error, rights)
        case (
            psycopg.errors.UndefinedTable()
            | psycopg.errors.UndefinedFunction()
            | psycopg.errors.InvalidSchemaName()
        ):
            return "the schema is missing or outdated; run pillarbox migrate"
        case _:
            return remedy_of(error)
