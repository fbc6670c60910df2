"""`outbox migrate`: make, update or remove the schema."""

import argparse
import sys
from datetime import timedelta
from typing import Any

from outbox.administration.migrate import (
    LOCK_TIMEOUT,
    migrate,
    migration_sql,
    unmigrate,
)
from outbox.cli.command import DATABASE_VARIABLE, Subcommands, add_database, url_of
from outbox.cli.table import printable
from outbox.errors import ConfigError, MigrationError
from outbox.url import without_password


def add_to(subcommands: Subcommands) -> None:
    """Add the command to the parser."""
    parser = subcommands.add_parser("migrate", help="make or update the schema")
    add_database(parser)
    parser.add_argument(
        "--sql", action="store_true", help="print the SQL instead of running it"
    )
    parser.add_argument(
        "--part",
        metavar="administrator|owner",
        help="with --sql: what an administrator runs first, or what a member of the"
        " owner's role runs then",
    )
    parser.add_argument(
        "--from",
        dest="from_version",
        metavar="VERSION",
        help="with --sql: go on from this version, which outbox.alembic_version has",
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
    parser.add_argument(
        "--lock-timeout",
        type=float,
        default=LOCK_TIMEOUT.total_seconds(),
        metavar="SECONDS",
        help="how long to wait for a lock that another session holds (default:"
        " %(default)g), while writers queue; for the end of another migration twelve"
        " times as long",
    )
    parser.add_argument("--role-prefix", default="pillarbox", metavar="NAME")
    parser.add_argument("--partman-schema", default="partman", metavar="NAME")
    parser.set_defaults(run=_run)


def _tell(line: str) -> None:
    sys.stderr.write(f"outbox: {printable(line)}\n")


def _run(arguments: argparse.Namespace) -> int:
    names: dict[str, Any] = {
        "role_prefix": arguments.role_prefix,
        "partman_schema": arguments.partman_schema,
        "lock_timeout": timedelta(seconds=arguments.lock_timeout),
    }
    with_cron = not arguments.without_cron
    if arguments.sql:
        sys.stdout.write(
            migration_sql(
                with_cron=with_cron,
                remove=arguments.remove,
                part=arguments.part,
                from_version=arguments.from_version,
                **names,
            )
        )
        return 0
    if arguments.part:
        raise ConfigError(
            f"part {arguments.part!r}: only printed SQL has parts; add --sql"
        )
    if arguments.from_version:
        raise ConfigError(
            f"from {arguments.from_version!r}: on a database its version is known;"
            " only printed SQL needs it; add --sql"
        )
    url = url_of(arguments.database, "database", DATABASE_VARIABLE)
    if not arguments.remove:
        migrate(url, with_cron=with_cron, **names)
    elif arguments.yes:
        unmigrate(url, **names, tell=_tell)
    else:
        raise MigrationError(
            f"this removes every message, receipt and dead letter of "
            f"{without_password(url)}: add --yes if you mean it"
        )
    return 0
