"""`outbox`: make the schema and look after it."""

import argparse
import sys
from collections.abc import Sequence
from typing import TypeAlias

import psycopg
from psycopg.errors import Diagnostic

from outbox.command import DATABASE_VARIABLE, add_database, command, url_of
from outbox.command import main as run_command
from outbox.database import conninfo, without_password
from outbox.errors import DatabaseUnavailableError, MigrationError
from outbox.migrate import migrate, migration_sql, unmigrate

Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; give its exit status."""
    parser = command("outbox", __doc__)
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_migrate(subcommands)
    _add_maintain(subcommands)
    return run_command(parser, lambda arguments: arguments.run(arguments), argv)


def _add_migrate(
    subcommands: Subcommands,
) -> None:
    parser = subcommands.add_parser("migrate", help="make or update the schema")
    add_database(parser)
    parser.add_argument(
        "--sql", action="store_true", help="print the SQL instead of running it"
    )
    parser.add_argument(
        "--remove", action="store_true", help="remove the schema with all its data"
    )
    parser.add_argument(
        "--yes", action="store_true", help="needed with --remove on a database"
    )
    parser.add_argument(
        "--without-cron",
        action="store_true",
        help="no pg_cron job: call outbox maintain hourly from elsewhere",
    )
    parser.add_argument("--role-prefix", default="pillarbox", metavar="NAME")
    parser.add_argument("--partman-schema", default="partman", metavar="NAME")
    parser.set_defaults(run=_migrate)


def _migrate(arguments: argparse.Namespace) -> int:
    names = {
        "role_prefix": arguments.role_prefix,
        "partman_schema": arguments.partman_schema,
    }
    with_cron = not arguments.without_cron
    if arguments.sql:
        sys.stdout.write(
            migration_sql(with_cron=with_cron, remove=arguments.remove, **names)
        )
        return 0
    url = url_of(arguments.database, "database", DATABASE_VARIABLE)
    if not arguments.remove:
        migrate(url, with_cron=with_cron, **names)
    elif arguments.yes:
        unmigrate(url, **names)
    else:
        raise MigrationError(
            f"this removes every message, receipt and dead letter of "
            f"{without_password(url)}: add --yes if you mean it"
        )
    return 0


def _add_maintain(
    subcommands: Subcommands,
) -> None:
    parser = subcommands.add_parser(
        "maintain", help="make partitions ahead, drop old ones (without pg_cron)"
    )
    add_database(parser)
    parser.set_defaults(run=_maintain)


def _maintain(arguments: argparse.Namespace) -> int:
    url = url_of(arguments.database, "database", DATABASE_VARIABLE)
    try:
        with psycopg.connect(
            conninfo(url, application_name="outbox maintain"), autocommit=True
        ) as connection:
            connection.add_notice_handler(_tell)
            connection.execute("CALL outbox.maintain()")
    except psycopg.OperationalError as error:
        raise DatabaseUnavailableError(
            f"can't reach the database {without_password(url)}: {error}"
        ) from error
    except psycopg.Error as error:
        raise MigrationError(
            f"{error.diag.message_primary}; {error.diag.message_hint or ''}"
        ) from error
    return 0


def _tell(notice: Diagnostic) -> None:
    sys.stderr.write(f"outbox: {notice.message_primary}; {notice.message_hint or ''}\n")
