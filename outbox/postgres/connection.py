"""Connections to PostgreSQL for pillarbox's processes: async psycopg, autocommit."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import TupleRow

from outbox.errors import ConfigError, DatabaseUnavailableError, message_of
from outbox.postgres.sql_files import load
from outbox.url import FileUrl, without_password

if TYPE_CHECKING:
    from sqlalchemy import URL

Connection = psycopg.AsyncConnection[TupleRow]

_SCHEMES: Final = ("postgresql", "postgres")
_REMEDY: Final = (
    "use postgresql://user:password@host:port/database, and percent-encode special "
    "characters in the user and password (%40 for @)"
)
_UNKNOWN_OPTION: Final = "invalid URI query parameter"
_PINNED: Final = {
    "search_path": "pg_catalog, pg_temp",
    "DateStyle": "'ISO, MDY'",
    "IntervalStyle": "'postgres'",
    "TimeZone": "'UTC'",
    "client_encoding": "'UTF8'",
    "bytea_output": "'hex'",
    "extra_float_digits": "1",
    "array_nulls": "on",
    "standard_conforming_strings": "on",
    "quote_all_identifiers": "off",
    "default_transaction_isolation": "'read committed'",
    "row_security": "off",
}
PIN_SESSION: Final = "; ".join(f"SET {name} = {to}" for name, to in _PINNED.items())
"""Settings our sessions rely on, whatever ALTER ROLE and ALTER DATABASE say; one query.

With another search_path, our sessions could call, with our privileges, routines and
operators that any role created in `public`: PostgreSQL prefers one that matches the
arguments better than the catalog's. In another DateStyle, psycopg can't read
timestamps. With row_security on, a policy would hide rows from us without an error.
"""
PIN_SESSION_LOCALLY: Final = PIN_SESSION.replace("SET ", "SET LOCAL ")
"""The same settings until the transaction ends."""
PIN_SEARCH_PATH_LOCALLY: Final = "SET LOCAL search_path = pg_catalog, pg_temp"
"""Only the search_path, until the transaction ends, for a transaction of the user's."""
# A peer that vanished silently is noticed within about 25 s.
_SETTINGS: Final[Mapping[str, Any]] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}


def conninfo(url: str, *, application_name: str = "pillarbox") -> str:
    """Return libpq's connection string for a URL, also for `postgresql+driver://`.

    Settings in the URL override pillarbox's. A URL from a file is read again, so that
    each connection has the present password.

    Raises:
        ConfigError: it isn't a valid PostgreSQL URL.
    """
    if isinstance(url, FileUrl):
        url = url.current()
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.partition("+")[0] not in _SCHEMES:
        raise ConfigError(
            f"database URL with scheme {scheme.partition(':')[0]!r}: "
            "use postgresql://user@host:port/database"
        )
    try:
        given = conninfo_to_dict(f"postgresql://{rest}")
    except (psycopg.ProgrammingError, UnicodeError) as error:
        # After the colon, libpq quotes the URL, the password, or the name of an option;
        # that name is part of a password if an @ follows it.
        problem, _, quoted = str(error).partition(":")
        if problem == _UNKNOWN_OPTION and "@" not in rest.partition("?")[2]:
            problem += f" {quoted.strip()}"
        raise ConfigError(
            f"database URL {without_password(url)}: {problem}; {_REMEDY}"
        ) from None
    if not all(map(_is_port, str(given.get("port", "")).split(","))):
        raise ConfigError(
            f"database URL {without_password(url)}: invalid port; {_REMEDY}"
        )
    return make_conninfo(
        "", **{**_SETTINGS, "application_name": application_name, **given}
    )


def _is_port(text: str) -> bool:
    return not text or (text.isdecimal() and 0 < int(text) < 1 << 16)


def sqlalchemy_url(url: str) -> str:
    """Return the URL with SQLAlchemy's name for psycopg 3, after checking it."""
    conninfo(url)
    return f"postgresql+psycopg://{url.partition('://')[2]}"


def libpq_url(url: "URL") -> str:
    """Return a URL of SQLAlchemy as text that libpq reads, with the password.

    SQLAlchemy doesn't encode all spaces, and libpq doesn't read `+` as one.
    """
    text = url.set(query={}).render_as_string(hide_password=False).replace(" ", "%20")
    query = urlencode(url.query, doseq=True, quote_via=quote)
    return f"{text}?{query}" if query else text


async def connect(
    url: str,
    *,
    application_name: str,
    settings: Mapping[str, str] | None = None,
    shared: bool = False,
    writes: Sequence[str] = (),
) -> Connection:
    """Open a connection in autocommit mode, with session settings applied.

    Args:
        shared: whether other clients may use its server session, too, behind a pooler
            in transaction mode: then the session isn't pinned, and statements must
            qualify every function with its schema.
        writes: the tables into which the session will insert.

    Raises:
        DatabaseUnavailableError: the database is unreachable, or rejects the
            connection.
        psycopg.Error: it can't insert into these tables; see `check_writable`.
        ConfigError: the URL is invalid.
    """
    try:
        given = conninfo(url, application_name=application_name)
    except ConfigError as error:
        if not isinstance(url, FileUrl):
            raise
        # The next attempt may find a file that is correct again.
        raise DatabaseUnavailableError(str(error)) from error
    try:
        connection = await psycopg.AsyncConnection.connect(given, autocommit=True)
    except psycopg.OperationalError as error:
        raise DatabaseUnavailableError(
            f"can't reach the database {without_password(url)}: {message_of(error)}"
        ) from error
    try:
        if not shared:
            await connection.execute(PIN_SESSION)
        if settings:
            each = ["pg_catalog.set_config(%s, %s, false)"] * len(settings)
            await connection.execute(
                f"SELECT {', '.join(each)}", [*chain.from_iterable(settings.items())]
            )
        if writes:
            await check_writable(connection, writes)
    except BaseException:
        await connection.close()
        raise
    return connection


async def check_writable(connection: Connection, tables: Sequence[str]) -> None:
    """Make sure that a session may insert into tables, before acting on their rows.

    Raises:
        psycopg.errors.ReadOnlySqlTransaction: it may not write at all.
        psycopg.errors.InsufficientPrivilege: it lacks the privilege.
        psycopg.errors.UndefinedTable: a table is missing.
    """
    cursor = await connection.execute(
        load("outbox", "check_writable"), {"tables": list(tables)}
    )
    ((read_only, refused),) = await cursor.fetchall()
    if read_only:
        raise psycopg.errors.ReadOnlySqlTransaction(
            "the database accepts no writes: the session is in a read-only transaction"
        )
    if refused:
        raise psycopg.errors.InsufficientPrivilege(
            f"permission denied to insert into {', '.join(refused)}"
        )


class Link:
    """One connection, reopened after it breaks.

    For one task at a time: tasks that share it hold its `lock` while they use it.

    Attributes:
        opened_at: when the connection was opened, as `time.monotonic()`. The server has
            not crashed since, if it is still open.
    """

    def __init__(
        self,
        url: str,
        *,
        application_name: str,
        settings: Mapping[str, str] | None = None,
        writes: Sequence[str] = (),
    ) -> None:
        self._url = url
        self._application_name = application_name
        self._settings = settings
        self._writes = writes
        self._connection: Connection | None = None
        self.opened_at = 0.0
        self.lock = asyncio.Lock()

    async def connection(self) -> Connection:
        """Return the open connection, or open one.

        Raises:
            DatabaseUnavailableError: the database is unreachable.
            psycopg.Error: a new session can't insert into the tables in `writes`.
        """
        if self._connection is not None and not self._connection.closed:
            return self._connection
        await self.close()
        self._connection = await connect(
            self._url,
            application_name=self._application_name,
            settings=self._settings,
            writes=self._writes,
        )
        self.opened_at = time.monotonic()
        return self._connection

    async def close(self) -> None:
        """Close the connection if there is one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
