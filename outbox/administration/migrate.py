"""Create, update and remove the schema, with pillarbox's own Alembic environment."""

import io
from collections.abc import Callable
from datetime import timedelta
from importlib.resources import files
from threading import Lock as ThreadLock
from typing import Any, Final, NoReturn

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import OperationalError as SQLAlchemyOperationalError

from outbox.administration.names import Names
from outbox.errors import ConfigError, DatabaseUnavailableError, MigrationError
from outbox.postgres.connection import sqlalchemy_url
from outbox.postgres.pooler_check import refuse_pooler

LOCK_TIMEOUT: Final = timedelta(seconds=10)
"""How long a migration waits for each lock, while writers queue."""
_LOCK_NOT_AVAILABLE: Final = "55P03"
# Alembic keeps the state of a migration in globals.
_ONE_AT_A_TIME: Final = ThreadLock()
_MISSING_ALEMBIC: Final = (
    "alembic is not installed: run pip install 'pillarbox[migrations]'"
)


def migrate(
    url: str,
    *,
    with_cron: bool = True,
    role_prefix: str = "pillarbox",
    partman_schema: str | None = "partman",
) -> None:
    """Bring the database's schema up to date; a second run changes nothing.

    Everything happens in one transaction. Alembic runs only one migration at a time:
    don't call this in an env.py.

    Args:
        url: the database, with a role that may create roles, schemas and extensions.
        with_cron: let pg_cron run the upkeep every hour; otherwise run
            `pillarbox maintain` from another scheduler.
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
    config = _config(role_prefix, partman_schema, url=url, with_cron=with_cron)
    refuse_pooler(url)
    _run(lambda command: command.upgrade(config, "head"))


def unmigrate(
    url: str,
    *,
    role_prefix: str = "pillarbox",
    partman_schema: str | None = "partman",
) -> None:
    """Remove the schema with all its data; keep the roles and the extensions.

    Raises:
        MigrationError: the removal failed; nothing was changed.
        DatabaseUnavailableError: the database is unreachable.
        ConfigError: as for `migrate`.
    """
    config = _config(role_prefix, partman_schema, url=url, remove=True)
    refuse_pooler(url)
    _run(lambda command: command.upgrade(config, "head"))


def migration_sql(
    *,
    with_cron: bool = True,
    role_prefix: str = "pillarbox",
    partman_schema: str | None = "partman",
    remove: bool = False,
    part: str | None = None,
    from_version: str | None = None,
) -> str:
    """Return the SQL of `migrate` or `unmigrate`, for psql with ON_ERROR_STOP.

    Args:
        part: `administrator` for the statements that create roles, schemas, jobs and
            grants on extensions, which run first; `owner` for the rest, which any
            member of the owner's role can run; None for both together.
        from_version: the version in `outbox.alembic_version`; the SQL changes nothing
            in a schema of another version. None if there is no schema yet.

    Raises:
        ConfigError: alembic isn't installed, or an argument is invalid.
    """
    if remove and (part, from_version) != (None, None):
        raise ConfigError(
            f"part={part}, from_version={from_version}: an administrator runs the whole"
            " removal, from any version; leave them out"
        )
    if part not in {None, "administrator", "owner"}:
        raise ConfigError(f"part={part!r}: use administrator or owner")
    config = _config(
        role_prefix,
        partman_schema,
        with_cron=with_cron,
        remove=remove,
        from_version=from_version,
        part=part,
    )
    output = config.output_buffer = io.StringIO()
    way = "head" if from_version is None else f"{from_version}:head"
    _run(lambda command: command.upgrade(config, way, sql=True))
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
        "script_location", str(files("outbox.migrations")).replace("%", "%%")
    )
    config.set_main_option("path_separator", "os")
    config.attributes.update(attributes, names=names)
    if "url" in attributes:
        config.attributes["url"] = sqlalchemy_url(attributes["url"])
    return config


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
    if getattr(error.orig, "sqlstate", None) == _LOCK_NOT_AVAILABLE:
        raise MigrationError(
            "timed out waiting for a lock, and nothing was changed: another migration"
            " runs, or a transaction is using the tables (pillarbox status lists those"
            " that are open); end it, or try again when it has ended"
        ) from error
    if isinstance(error, SQLAlchemyOperationalError):
        raise DatabaseUnavailableError(
            f"can't reach the database: {str(error.orig).strip()}"
        ) from error
    problem = getattr(diagnosis, "message_primary", None) or str(error.orig)
    remedy = getattr(diagnosis, "message_hint", None) or "nothing was changed"
    raise MigrationError(f"{problem}; {remedy}") from error
