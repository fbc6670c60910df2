"""Make, change and remove the schema: our own Alembic, beside the user's."""

import io
from collections.abc import Callable
from datetime import timedelta
from importlib.resources import files
from threading import Lock as ThreadLock
from typing import Any, Final, NoReturn

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import OperationalError as SQLAlchemyOperationalError

from outbox.administration.names import Names
from outbox.errors import ConfigError, DatabaseUnavailableError, MigrationError
from outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from outbox.postgres.connection import PIN_SESSION, conninfo, sqlalchemy_url
from outbox.postgres.lease import LockHolder
from outbox.postgres.pooler_check import refuse_pooler
from outbox.postgres.sql_files import load

LOCK_TIMEOUT: Final = timedelta(seconds=10)
"""How long a migration waits for a lock, unless told otherwise."""
_LOCK_NOT_AVAILABLE: Final = "55P03"
# Alembic keeps the migration under way in globals.
_ONE_AT_A_TIME: Final = ThreadLock()
_MISSING_ALEMBIC: Final = (
    "alembic is not installed: run pip install 'pillarbox[migrations]'"
)


def migrate(
    url: str,
    *,
    with_cron: bool = True,
    role_prefix: str = "pillarbox",
    partman_schema: str = "partman",
    lock_timeout: timedelta = LOCK_TIMEOUT,
) -> None:
    """Bring the database's schema up to date; a second run changes nothing.

    Everything happens in one transaction; another one, beside which writers go on,
    validates constraints that the first added to tables with rows.

    Args:
        url: of a role that may create roles, schemas and extensions.
        with_cron: let pg_cron run the upkeep every hour; else call
            `pillarbox maintain` from another scheduler.
        role_prefix: put before the names of the seven roles.
        partman_schema: where pg_partman is, or is to be, installed.
        lock_timeout: how long to wait for each lock that another session holds, while
            writers queue; for the end of another migration twelve times as long.

    Raises:
        MigrationError: it can't be done as things are; the message says what to do, and
            names the sessions that hold what a lock was not had for.
        DatabaseUnavailableError: the database can't be reached.
        ConfigError: alembic isn't installed, an argument can't be used, or a pooler in
            transaction mode is in between.
    """
    config = _config(
        role_prefix,
        partman_schema,
        url=url,
        with_cron=with_cron,
        lock_timeout=lock_timeout,
    )
    refuse_pooler(url)
    _run(lambda command: command.upgrade(config, "head"), url)


def migrate_on(
    connection: Connection,
    *,
    with_cron: bool = True,
    role_prefix: str = "pillarbox",
    partman_schema: str = "partman",
    lock_timeout: timedelta = LOCK_TIMEOUT,
) -> None:
    """Do what `migrate` does on a connection of your own, of any driver.

    In its transaction if it has begun one, else in one of its own. On an
    `AsyncConnection`: `await connection.run_sync(migrate_on)`. Not from inside an
    env.py, since Alembic runs one at a time.

    Raises:
        MigrationError: it can't be done as things are; the message says what to do.
        ConfigError: alembic isn't installed, or an argument can't be used.
    """
    config = _config(
        role_prefix,
        partman_schema,
        connection=connection,
        with_cron=with_cron,
        lock_timeout=lock_timeout,
    )
    _run(lambda command: command.upgrade(config, "head"))


def unmigrate(
    url: str,
    *,
    role_prefix: str = "pillarbox",
    partman_schema: str = "partman",
    lock_timeout: timedelta = LOCK_TIMEOUT,
    tell: Callable[[str], None] | None = None,
) -> None:
    """Remove the schema with all its data; roles and extensions in use stay.

    Args:
        tell: is given a line for each role that stays because pg_cron, in another
            database, may have a job of it, with the SQL that ends it.

    Raises:
        MigrationError: it can't be done as things are; nothing was changed.
        DatabaseUnavailableError: the database can't be reached.
        ConfigError: as for `migrate`.
    """
    config = _config(
        role_prefix,
        partman_schema,
        url=url,
        remove=True,
        lock_timeout=lock_timeout,
        tell=tell,
    )
    refuse_pooler(url)
    _run(lambda command: command.downgrade(config, "base"), url)


def migration_sql(
    *,
    with_cron: bool = True,
    role_prefix: str = "pillarbox",
    partman_schema: str = "partman",
    remove: bool = False,
    part: str | None = None,
    from_version: str | None = None,
    lock_timeout: timedelta = LOCK_TIMEOUT,
) -> str:
    """Give the SQL of `migrate` or `unmigrate`, to run in psql with ON_ERROR_STOP.

    Args:
        part: `administrator` for the statements that make roles, schemas, grants on
            extensions and jobs, to be run first; `owner` for the rest, to be run by
            any member of the owner's role; None for both in one.
        from_version: what `outbox.alembic_version` has, to go on from there; its SQL
            changes nothing where another version is. None: there is no schema yet.

    Raises:
        ConfigError: alembic isn't installed, or an argument can't be used.
    """
    if from_version is not None and remove:
        raise ConfigError(
            f"from_version={from_version}: all is removed, whatever it is; leave it out"
        )
    if part is not None and remove:
        raise ConfigError(
            f"part={part}: an administrator removes everything at once; leave it out"
        )
    config = _config(
        role_prefix,
        partman_schema,
        with_cron=with_cron,
        remove=remove,
        from_version=from_version,
        lock_timeout=lock_timeout,
    )
    if from_version is not None:
        _check_version(from_version, config)
    output = config.output_buffer = io.StringIO()
    if remove:
        _run(lambda command: command.downgrade(config, "head:base", sql=True))
    else:
        way = "head" if from_version is None else f"{from_version}:head"
        _run(lambda command: command.upgrade(config, way, sql=True))
    script = output.getvalue()
    if part is None:
        return script
    from outbox.migrations.parts import Part, part_of

    if part not in set(Part):
        raise ConfigError(f"part={part!r}: use {' or '.join(Part)}")
    chosen: str = part_of(
        script, Part(part), Names(role_prefix=role_prefix).role("owner")
    )
    return chosen


def _check_version(version: str, config: Any) -> None:
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory.from_config(config).walk_revisions()
    versions = sorted(script.revision for script in scripts)
    if version not in versions:
        raise ConfigError(
            f"from_version={version!r}: use what outbox.alembic_version has,"
            f" one of {', '.join(versions)}"
        )


def _config(
    role_prefix: str,
    partman_schema: str,
    *,
    lock_timeout: timedelta = LOCK_TIMEOUT,
    **attributes: Any,
) -> Any:
    if not timedelta(milliseconds=1) <= lock_timeout <= timedelta(days=1):
        raise ConfigError(
            f"lock_timeout={lock_timeout}: must be above 0 and at most a day"
        )
    names = Names(role_prefix=role_prefix, partman_schema=partman_schema)
    names.check()
    try:
        from alembic.config import Config
    except ModuleNotFoundError as error:
        raise ConfigError(_MISSING_ALEMBIC) from error
    config = Config()
    config.set_main_option(
        "script_location", str(files("outbox.migrations")).replace("%", "%%")
    )
    config.set_main_option("path_separator", "os")
    config.attributes.update(attributes, names=names, lock_timeout=lock_timeout)
    if "url" in attributes:
        config.attributes["url"] = sqlalchemy_url(attributes["url"])
    return config


def _run(step: Callable[[Any], None], url: str | None = None) -> None:
    from alembic import command
    from alembic.util import CommandError

    try:
        with _ONE_AT_A_TIME:
            step(command)
    except DBAPIError as error:
        _raise(error, url)
    except CommandError as error:
        raise MigrationError(f"{error}; nothing was changed") from error


def _raise(error: DBAPIError, url: str | None) -> NoReturn:
    codes = (getattr(error.orig, name, None) for name in ("sqlstate", "pgcode"))
    if _LOCK_NOT_AVAILABLE in codes:
        raise MigrationError(
            "a lock could not be had in time:"
            f" {_list_lockers(url) or 'another session holds it'};"
            " nothing was changed: end that session's transaction, or run it again with"
            " a higher --lock-timeout"
        ) from error
    if isinstance(error, SQLAlchemyOperationalError):
        raise DatabaseUnavailableError(
            f"can't reach the database: {str(error.orig).strip()}"
        ) from error
    diagnosis = getattr(error.orig, "diag", None)
    # SQLAlchemy wraps asyncpg's error, which has the same by other names.
    cause = getattr(error.orig, "__cause__", None)
    problem = (
        getattr(diagnosis, "message_primary", None)
        or getattr(cause, "message", None)
        or str(error.orig)
    )
    remedy = getattr(diagnosis, "message_hint", None) or getattr(cause, "hint", None)
    raise MigrationError(f"{problem}; {remedy or 'nothing was changed'}") from error


def _list_lockers(url: str | None) -> str:
    """Name who holds what a migration needs: our own transaction is over."""
    if url is None:
        return ""
    import psycopg

    try:
        with psycopg.connect(conninfo(url), autocommit=True) as connection:
            connection.execute(PIN_SESSION)
            rows = connection.execute(
                load("outbox", "list_lockers"),
                {"class": LOCK_CLASS, "migration": int(Lock.MIGRATION)},
            ).fetchall()
    except psycopg.Error:
        return ""
    return ", ".join(
        f"{LockHolder(pid, role, application, client)} holds {what}"
        + ("" if since is None else f", in a transaction of {since}")
        for pid, role, application, client, what, since in rows
    )
