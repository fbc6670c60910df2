"""The connection of a command for the DBA, and what its failures mean."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

import psycopg
from psycopg.rows import TupleRow

from outbox.errors import DatabaseUnavailableError, UpkeepError, message_of
from outbox.postgres.connection import PIN_SESSION, conninfo
from outbox.postgres.pooler_check import refuse_pooler
from outbox.url import without_password

AdministrationConnection: TypeAlias = "psycopg.Connection[TupleRow]"

# Connection lost, access refused, no such database, too many clients, shut down.
_AWAY: Final = ("08", "28", "3D", "53", "57P")
_RIGHTS: Final = (
    "connect as a member of pillarbox_monitor to look, of pillarbox_maintainer for "
    "upkeep, of pillarbox_owner to change policy"
)


@contextmanager
def administration(
    url: str, *, application_name: str, rights: str = _RIGHTS
) -> Iterator[AdministrationConnection]:
    """Give a connection in autocommit mode, for one command.

    Args:
        rights: what to do about a right that is missing.

    Raises:
        DatabaseUnavailableError: the database can't be reached, or was lost.
        ConfigError: a pooler in transaction mode is in between.
        UpkeepError: a statement failed; the message names the remedy.
    """
    refuse_pooler(url)
    try:
        with psycopg.connect(
            conninfo(url, application_name=application_name), autocommit=True
        ) as connection:
            connection.execute(PIN_SESSION)
            yield connection
    except psycopg.Error as error:
        if error.sqlstate is None or error.sqlstate.startswith(_AWAY):
            raise DatabaseUnavailableError(
                f"can't reach the database {without_password(url)}: {message_of(error)}"
            ) from error
        raise UpkeepError(
            f"{error.diag.message_primary or error}; {_remedy(error, rights)}"
        ) from error


def _remedy(error: psycopg.Error, rights: str) -> str:
    if error.diag.message_hint:
        return error.diag.message_hint
    match error:
        case psycopg.errors.InsufficientPrivilege():
            return rights
        case (
            psycopg.errors.UndefinedTable()
            | psycopg.errors.UndefinedFunction()
            | psycopg.errors.InvalidSchemaName()
        ):
            return "the schema is missing or older than this program: pillarbox migrate"
        case _:
            return "run pillarbox doctor to see what is wrong"
