"""Make, change and remove the schema: our own Alembic, beside the user's."""

import io
from collections.abc import Callable
from importlib.resources import files
from threading import Lock
from typing import Any, Final

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import OperationalError as SQLAlchemyOperationalError

from outbox.database import sqlalchemy_url
from outbox.errors import ConfigError, DatabaseUnavailableError, MigrationError
from outbox.pooler import refuse_pooler

# Alembic keeps the migration under way in globals.
_ONE_AT_A_TIME: Final = Lock()
_MISSING_ALEMBIC: Final = (
    "alembic is not installed: run pip install 'pillarbox[migrations]'"
)


def migrate(
    url: str,
    *,
    with_cron: bool = True,
    role_prefix: str = "pillarbox",
    partman_schema: str = "partman",
) -> None:
    """Bring the database's schema up to date; a second run changes nothing.

    Everything happens in one transaction.

    Args:
        url: of a role that may create roles, schemas and extensions.
        with_cron: let pg_cron run the upkeep every hour; else call
            `outbox maintain` from another scheduler.
        role_prefix: put before the names of the seven roles.
        partman_schema: where pg_partman is, or is to be, installed.

    Raises:
        MigrationError: it can't be done as things are; the message says what to do.
        DatabaseUnavailableError: the database can't be reached.
        ConfigError: alembic isn't installed, an argument can't be used, or a pooler in
            transaction mode is in between.
    """
    config = _config(role_prefix, partman_schema, url=url, with_cron=with_cron)
    refuse_pooler(url)
    _run(lambda command: command.upgrade(config, "head"))


def migrate_on(
    connection: Connection,
    *,
    with_cron: bool = True,
    role_prefix: str = "pillarbox",
    partman_schema: str = "partman",
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
        role_prefix, partman_schema, connection=connection, with_cron=with_cron
    )
    _run(lambda command: command.upgrade(config, "head"))


def unmigrate(
    url: str,
    *,
    role_prefix: str = "pillarbox",
    partman_schema: str = "partman",
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
    config = _config(role_prefix, partman_schema, url=url, remove=True, tell=tell)
    refuse_pooler(url)
    _run(lambda command: command.downgrade(config, "base"))


def migration_sql(
    *,
    with_cron: bool = True,
    role_prefix: str = "pillarbox",
    partman_schema: str = "partman",
    remove: bool = False,
    part: str | None = None,
    from_version: str | None = None,
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
    chosen: str = part_of(script, Part(part), f"{role_prefix}_owner")
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


def _config(role_prefix: str, partman_schema: str, **attributes: Any) -> Any:
    try:
        from alembic.config import Config

        from outbox.migrations.script import Names
    except ModuleNotFoundError as error:
        raise ConfigError(_MISSING_ALEMBIC) from error
    config = Config()
    config.set_main_option(
        "script_location", str(files("outbox.migrations")).replace("%", "%%")
    )
    config.set_main_option("path_separator", "os")
    names = Names(role_prefix=role_prefix, partman_schema=partman_schema)
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
    except SQLAlchemyOperationalError as error:
        raise DatabaseUnavailableError(
            f"can't reach the database: {str(error.orig).strip()}"
        ) from error
    except DBAPIError as error:
        diagnosis = getattr(error.orig, "diag", None)
        # SQLAlchemy wraps asyncpg's error, which has the same by other names.
        cause = getattr(error.orig, "__cause__", None)
        problem = (
            getattr(diagnosis, "message_primary", None)
            or getattr(cause, "message", None)
            or str(error.orig)
        )
        remedy = getattr(diagnosis, "message_hint", None) or getattr(
            cause, "hint", None
        )
        raise MigrationError(f"{problem}; {remedy or 'nothing was changed'}") from error
    except CommandError as error:
        raise MigrationError(f"{error}; nothing was changed") from error
