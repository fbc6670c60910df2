"""`pillarbox migrate`: create, update or remove the schema."""

import sys
from typing import Annotated, Any, Literal

import typer
from psycopg.conninfo import conninfo_to_dict

from pillarbox.outbox.administration.migrate import migrate, migration_sql, unmigrate
from pillarbox.outbox.administration.tenants import add_tenant_index, drop_tenant_index
from pillarbox.outbox.cli.command import (
    Database,
    command,
    database_url,
    new_app,
    opened,
)
from pillarbox.outbox.cli.output import warn
from pillarbox.outbox.errors import ConfigError, MigrationError
from pillarbox.outbox.logs.printable import for_shell
from pillarbox.outbox.postgres.connection import conninfo
from pillarbox.outbox.url import without_password

app = new_app()

_RIGHTS = "connect as a member of pillarbox_owner"


@command(app, "migrate")
def _migrate(
    *,
    database: Database = None,
    sql: Annotated[
        Literal["all", "administrator", "owner"] | None,
        typer.Option(
            help="Print the SQL instead of running it: all of it, the administrator's"
            " part, which comes first, or the owner's part.",
            show_default=False,
        ),
    ] = None,
    remove: Annotated[
        str | None,
        typer.Option(
            metavar="DATABASE",
            help="Remove the schema with all its data; to confirm, name the database.",
            show_default=False,
        ),
    ] = None,
    without_cron: Annotated[
        bool,
        typer.Option(
            "--without-cron",
            help="Create no pg_cron job; run pillarbox maintain hourly from another "
            "scheduler.",
        ),
    ] = False,
    without_partman: Annotated[
        bool,
        typer.Option(
            "--without-partman",
            help="Let pillarbox create the partitions, on a server without"
            " pg_partman. A later migration without this option hands them over"
            " to pg_partman.",
        ),
    ] = False,
    tenants: Annotated[
        bool | None,
        typer.Option(
            "--tenants/--no-tenants",
            help="Also create, or drop, an index on tenants, so that consumers of the"
            " outbox share its whole backlog fairly among them. It is built day"
            " by day, while messages are added.",
            show_default=False,
        ),
    ] = None,
    role_prefix: Annotated[
        str, typer.Option(metavar="NAME", help="Prefix of the names of the roles.")
    ] = "pillarbox",
    partman_schema: Annotated[
        str, typer.Option(metavar="NAME", help="pg_partman's schema.")
    ] = "partman",
) -> None:
    """Create or update the schema."""
    names: dict[str, Any] = {
        "role_prefix": role_prefix,
        "partman_schema": None if without_partman else partman_schema,
    }
    if tenants is not None and (sql or remove is not None):
        raise ConfigError(
            "--tenants and --no-tenants can't be combined with --sql or --remove: run"
            " pillarbox migrate with them afterwards"
        )
    if sql:
        sys.stdout.write(
            migration_sql(
                with_cron=not without_cron,
                remove=remove is not None,
                part=None if sql == "all" else sql,
                **names,
            )
        )
        return
    url = database_url(database)
    if remove is None:
        migrate(url, with_cron=not without_cron, **names)
        if tenants is not None:
            change = add_tenant_index if tenants else drop_tenant_index
            with opened(url, "migrate", rights=_RIGHTS, any_role=True) as connection:
                change(connection)
        return
    name = conninfo_to_dict(conninfo(url)).get("dbname")
    if remove != name:
        raise MigrationError(
            f"--remove {remove}: {without_password(url)} is the database {name}, of "
            "which every message, receipt and dead letter would be removed; write "
            f"--remove {for_shell(name)} if you mean it"
        )
    unmigrate(url, **names, tell=warn)
