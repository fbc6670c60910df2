"""Connections to PostgreSQL for pillarbox's processes: async psycopg, autocommit."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

import psycopg
from psycopg.abc import RV, PQGen
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import TupleRow
from typing_extensions import override

from pillarbox.outbox.errors import (
    ConfigError,
    DatabaseRefusedError,
    DatabaseUnavailableError,
    message_of,
)
from pillarbox.outbox.postgres.remedy import is_final
from pillarbox.outbox.postgres.sql_files import load
from pillarbox.outbox.url import FileUrl, scheme_of, without_password

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
    "idle_session_timeout": "0",
}
PIN_SESSION: Final = "; ".join(f"SET {name} = {to}" for name, to in _PINNED.items())
"""Settings our sessions rely on, whatever ALTER ROLE and ALTER DATABASE say; one query.

With another search_path, our sessions could call, with our privileges, routines and
operators that any role created in `public`: PostgreSQL prefers one that matches the
arguments better than the catalog's. In another DateStyle, psycopg can't read
timestamps. With row_security on, a policy would hide rows from us without an error.
With an idle_session_timeout, the server would end the sessions of an idle process.
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
ANSWER_LIMIT: Final = 20.0
"""How many seconds the statements of a `Link` wait for the server's answer."""
_CANCEL_LIMIT: Final = 1.0
_PREPARE_THRESHOLD: Final = 5
NOT_PREPARED: Final = 2**31
"""A threshold with which only statements are prepared that ask for it. Others are
planned for their own days each time."""


class _Session(psycopg.AsyncConnection[TupleRow]):
    """A connection that never waits for long on a server that hangs.

    Its kernel can still acknowledge what TCP sends, so keepalives notice nothing.

    Attributes:
        answer_limit: how many seconds a statement waits; None: until it is answered.
        started_at: when the server started, which tells a primary from its standbys.
    """

    answer_limit: float | None = None
    started_at: datetime | None = None

    @override
    async def wait(self, gen: PQGen[RV], *args: Any, **options: Any) -> RV:
        """Wait for the server.

        Raises:
            DatabaseUnavailableError: it didn't answer in time.
        """
        if self.answer_limit is not None:
            gen = self._limited(gen, self.answer_limit)
        try:
            return await super().wait(gen, *args, **options)
        except psycopg.errors.ReadOnlySqlTransaction:
            # A new connection may reach the primary.
            self.pgconn.finish()
            raise

    @override
    async def __aexit__(self, *exc_info: object) -> None:
        """Close the connection.

        psycopg would commit first, and if cancelled meanwhile, leave it open.
        """
        await self.close()

    def _limited(self, gen: PQGen[RV], seconds: float) -> PQGen[RV]:
        """Let a generator fail after a time: while it waits, psycopg often resumes it.

        A timer of the event loop takes several times as long.
        """
        limit = time.monotonic() + seconds
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > limit:
                    self.pgconn.finish()
                    raise DatabaseUnavailableError(
                        f"no answer from the database within {seconds:g} s"
                    )
                wanted = gen.send(ready)
        except StopIteration as end:
            result: RV = end.value
            return result

    @override
    async def cancel_safe(self, *, timeout: float = _CANCEL_LIMIT) -> None:
        """Cancel the statement; close the connection if the server doesn't react."""
        try:
            await super().cancel_safe(timeout=min(timeout, _CANCEL_LIMIT))
        except psycopg.Error:
            self.pgconn.finish()
            raise


def conninfo(url: str, *, application_name: str = "pillarbox") -> str:
    """Return libpq's connection string for a URL, also for `postgresql+driver://`.

    Settings in the URL override pillarbox's. A URL from a file is read again, so that
    each connection has the current password.

    Args:
        url: as `postgresql://user@host:port/name`.
        application_name: what `pg_stat_activity` shows.

    Raises:
        ConfigError: it isn't a valid PostgreSQL URL.
    """
    if isinstance(url, FileUrl):
        url = url.current()
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.partition("+")[0] not in _SCHEMES:
        raise ConfigError(
            f"database URL with scheme {scheme_of(url)!r}: "
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
    """Return the URL with SQLAlchemy's name for psycopg 3, after checking it.

    Args:
        url: as `postgresql://user@host:port/name`.
    """
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
    writes: Sequence[str] | None = None,
    answer_limit: float | None = None,
    prepare_threshold: int = _PREPARE_THRESHOLD,
) -> _Session:
    """Open a connection in autocommit mode, with session settings applied.

    Args:
        shared: whether other clients may use its server session, too, behind a pooler
            in transaction mode: then the session isn't pinned, and statements must
            qualify every function with its schema.
        writes: the tables into which the session will insert, if it may write.
        answer_limit: how many seconds a statement waits for its answer.
        prepare_threshold: how often statements are executed before they are prepared.

    Raises:
        DatabaseUnavailableError: the database is unreachable, or rejects the
            connection; a `DatabaseRefusedError` if the next attempt can't succeed.
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
        connection = await _Session.connect(
            given, autocommit=True, prepare_threshold=prepare_threshold
        )
    except psycopg.OperationalError as error:
        is_fixed = not (isinstance(url, FileUrl) or _reads_password(given))
        is_final_error = is_final(error, password_is_fixed=is_fixed)
        kind = DatabaseRefusedError if is_final_error else DatabaseUnavailableError
        raise kind(
            f"can't reach the database {without_password(url)}: {message_of(error)}"
        ) from error
    connection.answer_limit = answer_limit
    try:
        if not shared:
            await connection.execute(PIN_SESSION)
        if settings:
            each = ["pg_catalog.set_config(%s, %s, false)"] * len(settings)
            await connection.execute(
                f"SELECT {', '.join(each)}", [*chain.from_iterable(settings.items())]
            )
        if writes is not None:
            connection.started_at = await check_writable(connection, writes)
    except BaseException:
        await connection.close()
        raise
    return connection


def _reads_password(given: str) -> bool:
    """Return whether libpq reads the password from a file, which may change."""
    known = conninfo_to_dict(given)
    if known.get("password") or os.environ.get("PGPASSWORD"):
        return False
    named = known.get("passfile") or os.environ.get("PGPASSFILE")
    # Path.expanduser raises if the user has no home directory, as in a systemd unit.
    return bool(named or Path(os.path.expanduser("~/.pgpass")).exists())  # noqa: PTH111


async def check_writable(connection: Connection, tables: Sequence[str]) -> datetime:
    """Make sure that a session may insert into tables, before acting on their rows.

    Returns:
        When its server started.

    Raises:
        psycopg.errors.ReadOnlySqlTransaction: it may not write at all.
        psycopg.errors.InsufficientPrivilege: it lacks the privilege.
        psycopg.errors.UndefinedTable: a table is missing.
    """
    cursor = await connection.execute(
        load("outbox", "check_writable"), {"tables": list(tables)}
    )
    ((read_only, refused, started_at),) = await cursor.fetchall()
    if read_only:
        raise psycopg.errors.ReadOnlySqlTransaction(
            "the database accepts no writes: the session is in a read-only transaction"
        )
    if refused:
        raise psycopg.errors.InsufficientPrivilege(
            f"permission denied to insert into {', '.join(refused)}"
        )
    assert isinstance(started_at, datetime)
    return started_at


class Server:
    """The server that a process works with: the one that its newest session reached.

    After a switchover, sessions can stay open on the old primary, which is read-only or
    doesn't answer. So when a link of the process reaches another server, the others
    reopen their sessions before they use them again.
    """

    started_at: datetime | None = None


class Link:
    """One connection, reopened after it breaks, or if `server` has changed.

    For one task at a time: tasks that share it hold its `lock` while they use it.

    Args:
        server: shared by all links of a process to one database.

    Attributes:
        application_name: that of the next connection.
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
        server: Server | None = None,
        answer_limit: float | None = None,
        prepare_threshold: int = _PREPARE_THRESHOLD,
    ) -> None:
        self._url = url
        self.application_name = application_name
        self._settings = settings
        self._writes = writes
        self._server = server or Server()
        self._answer_limit = answer_limit
        self._prepare_threshold = prepare_threshold
        self._connection: _Session | None = None
        self.opened_at = 0.0
        self.lock = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """Whether its connection is open, and that of the process's server."""
        connection = self._connection
        return (
            connection is not None
            and not connection.closed
            and connection.started_at == self._server.started_at
        )

    async def connection(self) -> Connection:
        """Return the open connection, or open one.

        Raises:
            DatabaseUnavailableError: the database is unreachable.
            psycopg.Error: a new session can't insert into the tables in `writes`.
        """
        if self._connection is not None and self.is_open:
            return self._connection
        await self.close()
        self._connection = await connect(
            self._url,
            application_name=self.application_name,
            settings=self._settings,
            writes=self._writes,
            answer_limit=self._answer_limit or ANSWER_LIMIT,
            prepare_threshold=self._prepare_threshold,
        )
        self._server.started_at = self._connection.started_at
        self.opened_at = time.monotonic()
        return self._connection

    @asynccontextmanager
    async def use(self, only: Connection | None = None) -> AsyncIterator[Connection]:
        """Yield the open connection, or a new one, to one task; close it if that fails.

        Args:
            only: a connection of this link, which may have been replaced.

        Raises:
            DatabaseUnavailableError: it was, or the process works with another server.
        """
        async with self.lock:
            if only is not None and not (only is self._connection and self.is_open):
                raise DatabaseUnavailableError("the session was lost")
            connection = only or await self.connection()
            try:
                yield connection
            except psycopg.Error:
                await connection.close()
                raise

    async def close(self) -> None:
        """Close the connection if there is one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
