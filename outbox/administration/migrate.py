"""Create, update and remove the schema, with pillarbox's own Alembic environment."""

import io
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.resources import files
from threading import Lock as ThreadLock
from typing import Any, Final, NoReturn

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import OperationalError as SQLAlchemyOperationalError

from pillarbox.outbox.administration.names import Names
from pillarbox.outbox.errors import (
    ConfigError,
    DatabaseUnavailableError,
    MigrationError,
    sqlstate_of,
)
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.postgres.pooler_check import refuse_pooler
from pillarbox.outbox.retry import RECONNECT

LOCK_TIMEOUT: Final = timedelta(milliseconds=100)
"""How long a migration waits for a lock, while others queue behind it; then it lets
them continue, and tries again. Less than deadlock_timeout: no other session is
ended."""
PATIENCE: Final = timedelta(minutes=2)
"""How long it tries to get a lock, or waits for another migration to end."""
DAYS_AHEAD: Final = 30
"""For how many days a migration without pg_cron creates partitions by default."""
_NO_LOCK: Final = {"55P03", "40P01"}  # lock_not_available, deadlock_detected
# Alembic keeps the state of a migration in globals.
_ONE_AT_A_TIME: Final = ThreadLock()
_MISSING_ALEMBIC: Final = (
    "alembic is not installed: run pip install 'pillarbox[migrations]'"
)


def migrate(
    database: str | Connection,
    *,
    with_cron: bool = True,
    days_ahead: int = DAYS_AHEAD,
    role_prefix: str = "pillarbox",
    partman_schema: str | None = "partman",
) -> None:
    """Bring the database's schema up to date; a second run changes nothing.

    What locks tables is in a short transaction of its own. If it doesn't get a lock in
    a tenth of a second, it lets others continue, and tries again, for two minutes. If
    it is interrupted, relays and consumers that start wait until it has run again.
    Alembic runs only one migration at a time: don't call this in an env.py.

    Args:
        database: its URL, with a role that may create roles, schemas and extensions; or
            a connection of yours, with any driver; if it has begun a transaction,
            everything is in that one. With an `AsyncConnection`: `await
            connection.run_sync(migrate)`.
        with_cron: let pg_cron run the upkeep every hour; otherwise run
            `pillarbox maintain` from another scheduler.
        days_ahead: without pg_cron, the days for which rows are accepted even if
            nothing runs the upkeep; at least the week that any migration creates.
        role_prefix: the prefix of the eight roles' names.
        partman_schema: the schema of pg_partman, which is installed there if missing;
            None: pillarbox makes the partitions itself. A later migration with a schema
            lets pg_partman continue with those that exist.

    Raises:
        MigrationError: the migration failed; the message says what to do.
        DatabaseUnavailableError: the database is unreachable.
        ConfigError: alembic isn't installed, an argument is invalid, or the URL leads
            to a pooler in transaction mode.
    """
    url = database if isinstance(database, str) else None
    config = _config(
        role_prefix,
        partman_schema,
        **({"connection": database} if url is None else {"url": url}),
        with_cron=with_cron,
        days_ahead=days_ahead,
    )
    if url is not None:
        refuse_pooler(url, any_role=True)
    _run_patiently(config, database)


def unmigrate(
    url: str,
    *,
    role_prefix: str = "pillarbox",
    partman_schema: str | None = "partman",
    tell: Callable[[str], None] | None = None,
) -> None:
    """Remove the schema with all its data; keep roles and extensions that are in use.

    Args:
        tell: called with a line for each role that is kept because it may own pg_cron
            jobs in another database, with the SQL that removes them.

    Raises:
        MigrationError: the removal failed; nothing was changed.
        DatabaseUnavailableError: the database is unreachable.
        ConfigError: as for `migrate`.
    """
    config = _config(role_prefix, partman_schema, url=url, remove=True, tell=tell)
    refuse_pooler(url, any_role=True)
    _run(lambda command: command.upgrade(config, "head"))


def migration_sql(
    *,
    with_cron: bool = True,
    days_ahead: int = DAYS_AHEAD,
    role_prefix: str = "pillarbox",
    partman_schema: str | None = "partman",
    remove: bool = False,
    part: str | None = None,
) -> str:
    """Return the SQL of `migrate` or `unmigrate`, for psql with ON_ERROR_STOP.

    Args:
        part: `administrator` for the statements that create roles, schemas, jobs and
            grants on extensions, which run first; `owner` for the rest, which any
            member of the owner's role can run; None for both together.

    Raises:
        ConfigError: alembic isn't installed, or an argument is invalid.
    """
    if remove and part is not None:
        raise ConfigError(
            f"part={part}: the removal has no parts; omit part, and run it as an"
            " administrator"
        )
    if part not in {None, "administrator", "owner"}:
        raise ConfigError(f"part={part!r}: use administrator or owner")
    config = _config(
        role_prefix,
        partman_schema,
        with_cron=with_cron,
        days_ahead=days_ahead,
        remove=remove,
        part=part,
    )
    output = config.output_buffer = io.StringIO()
    _run(lambda command: command.upgrade(config, "head", sql=True))
    return output.getvalue()


def _config(role_prefix: str, partman_schema: str | None, **attributes: Any) -> Any:
    names = Names(role_prefix=role_prefix, partman_schema=partman_schema)
    names.check()
    try:
        from alembic.config import Config
    except ModuleNotFoundError as error:
        raise ConfigError(_MISSING_ALEMBIC) from error
    config = Config()
    config.set_main_option(
        "script_location", str(files("pillarbox.outbox.migrations")).replace("%", "%%")
    )
    config.set_main_option("path_separator", "os")
    config.attributes.update(attributes, names=names)
    if "url" in attributes:
        config.attributes["url"] = sqlalchemy_url(attributes["url"])
    return config


def _run_patiently(config: Any, database: str | Connection) -> None:
    """Upgrade, again and again while other sessions hold locks on tables."""
    # A failed transaction of the caller's can't continue.
    is_theirs = not isinstance(database, str) and database.in_transaction()
    began, failures = time.monotonic(), 0
    while True:
        try:
            return _run(lambda command: command.upgrade(config, "head"))
        except MigrationError as error:
            is_over = time.monotonic() - began > PATIENCE.total_seconds()
            if is_theirs or is_over or sqlstate_of(error) not in _NO_LOCK:
                raise
        failures += 1
        time.sleep(RECONNECT.delay(failures).total_seconds())


def _run(step: Callable[[Any], None]) -> None:
    from alembic import command
    from alembic.util import CommandError

    try:
        with _ONE_AT_A_TIME:
            step(command)
    except DBAPIError as error:
        _raise(error)
    except CommandError as error:
        raise MigrationError(f"{error}; nothing was changed") from error


def _raise(error: DBAPIError) -> NoReturn:
    diagnosis = getattr(error.orig, "diag", None)
    # SQLAlchemy wraps asyncpg's error, whose attributes have other names.
    cause = getattr(error.orig, "__cause__", None)
    problem = (
        getattr(diagnosis, "message_primary", None)
        or getattr(cause, "message", None)
        or str(error.orig)
    )
    if sqlstate_of(error) in _NO_LOCK:
        raise MigrationError(
            "timed out waiting for a lock: another migration, a long transaction or"
            " autovacuum holds it; find it with SELECT pid, locktype,"
            " relation::regclass FROM pg_locks WHERE granted, and try again when it has"
            " ended: the migration continues where it stopped"
        ) from error
    if isinstance(error, SQLAlchemyOperationalError):
        raise DatabaseUnavailableError(
            f"can't reach the database: {str(error.orig).strip()}"
        ) from error
    remedy = getattr(diagnosis, "message_hint", None) or getattr(cause, "hint", None)
    remedy = remedy or "correct it, and migrate again: that continues from here"
    raise MigrationError(f"{problem}; {remedy}") from error
