"""`pillarbox migrate`: create, update or remove the schema."""

import sys
from datetime import timedelta
from typing import Annotated, Any

import typer

from outbox.administration.migrate import (
    LOCK_TIMEOUT,
    migrate,
    migration_sql,
    unmigrate,
)
from outbox.cli.command import (
    Database,
    Duration,
    command,
    database_url,
    duration_option,
    new_app,
)
from outbox.cli.output import warn
from outbox.errors import ConfigError, MigrationError
from outbox.url import without_password

app = new_app()


@command(app, "migrate")
def _migrate(
    *,
    database: Database = None,
    sql: Annotated[
        bool, typer.Option("--sql", help="Print the SQL instead of running it.")
    ] = False,
    part: Annotated[
        str | None,
        typer.Option(
            "--part",
            metavar="administrator|owner",
            help="With --sql: what an administrator runs first, or what a member of "
            "the owner's role runs after that.",
        ),
    ] = None,
    from_version: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="VERSION",
            envvar="PILLARBOX_MIGRATE_FROM",
            help="With --sql: start from this version, which outbox.alembic_version "
            "holds.",
        ),
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the schema with all its data.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Confirm --remove on a database.")
    ] = False,
    without_cron: Annotated[
        bool,
        typer.Option(
            "--without-cron",
            help="Create no pg_cron job; run pillarbox maintain hourly from another "
            "scheduler.",
        ),
    ] = False,
    drop_jobs_of: Annotated[
        str | None,
        typer.Option(
            "--drop-jobs-of",
            metavar="DATABASE",
            help="Also remove the jobs of pg_cron that look like pillarbox's and are "
            "those of this database, such as the one of which this is a copy.",
        ),
    ] = None,
    lock_timeout: Annotated[
        timedelta,
        duration_option(
            "--lock-timeout",
            help="How long to wait for a lock that another session holds, while "
            "writers queue; for another migration, twelve times as long.",
        ),
    ] = Duration.of(LOCK_TIMEOUT),
    role_prefix: Annotated[
        str,
        typer.Option(
            "--role-prefix", metavar="NAME", help="Prefix of the names of the roles."
        ),
    ] = "pillarbox",
    partman_schema: Annotated[
        str,
        typer.Option("--partman-schema", metavar="NAME", help="pg_partman's schema."),
    ] = "partman",
) -> None:
    """Create or update the schema."""
    names: dict[str, Any] = {
        "role_prefix": role_prefix,
        "partman_schema": partman_schema,
        "lock_timeout": lock_timeout,
    }
    if sql:
        sys.stdout.write(
            migration_sql(
                with_cron=not without_cron,
                remove=remove,
                part=part,
                from_version=from_version,
                **names,
            )
        )
        return
    if part:
        raise ConfigError(f"part {part!r}: only printed SQL has parts; add --sql")
    if from_version:
        raise ConfigError(
            f"from {from_version!r}: a database knows its version; only printed SQL "
            "needs it; add --sql"
        )
    url = database_url(database)
    if not remove:
        migrate(url, with_cron=not without_cron, drop_jobs_of=drop_jobs_of, **names)
    elif yes:
        unmigrate(url, **names, tell=warn)
    else:
        raise MigrationError(
            "this removes every message, receipt and dead letter of "
            f"{without_password(url)}: add --yes if you mean it"
        )
