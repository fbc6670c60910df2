"""`outbox maintain`: the upkeep, by any scheduler."""

import argparse
import sys

from psycopg.errors import Diagnostic

from outbox.administration.connection import administration
from outbox.administration.upkeep import (
    APPLICATION_NAME,
    Step,
    accept_clock,
    maintain,
    plan_upkeep,
)
from outbox.cli.command import DATABASE_VARIABLE, Subcommands, add_database, url_of
from outbox.cli.table import printable


def add_to(subcommands: Subcommands) -> None:
    """Add the command to the parser."""
    parser = subcommands.add_parser(
        "maintain", help="make partitions ahead, drop old ones (without pg_cron)"
    )
    add_database(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print each step with its reason"
    )
    parser.add_argument(
        "--accept-clock",
        action="store_true",
        help="drop what is expired although the last upkeep was long ago, or lies"
        " ahead: use it if the server's clock is right",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    url = url_of(arguments.database, "database", DATABASE_VARIABLE)
    with administration(url, application_name=APPLICATION_NAME) as connection:
        if arguments.dry_run:
            steps = plan_upkeep(connection)
            sys.stdout.write("".join(map(_line, steps)) or "nothing to do\n")
        else:
            connection.add_notice_handler(_warn)
            if arguments.accept_clock:
                accept_clock(connection)
            maintain(connection, tell=_tell)
    return 0


def _line(step: Step) -> str:
    subject = step.partition or step.parent_table
    if step.step == "make" and step.starts_at:
        subject += f" from {step.starts_at:%Y-%m-%d %H:%M}"
    rows = f" ({step.unsettled} rows)" if step.unsettled else ""
    return (
        f"{step.step:<8}  {printable(subject)}: {printable(step.reason)}{rows}\n"
        f"          {printable(step.statement)}\n"
    )


def _tell(line: str) -> None:
    sys.stdout.write(f"{printable(line)}\n")


def _warn(notice: Diagnostic) -> None:
    said = f"{notice.message_primary}; {notice.message_hint or ''}"
    sys.stderr.write(f"outbox: {printable(said)}\n")
