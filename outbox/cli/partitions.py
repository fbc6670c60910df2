"""`outbox partitions`: what exists, drawn as a timeline."""

import argparse
import json
import sys
from dataclasses import asdict

from outbox.administration.connection import administration
from outbox.administration.partitions import draw_timeline, legend, read_partitions
from outbox.cli.command import DATABASE_VARIABLE, Subcommands, add_database, url_of
from outbox.cli.retention import policy_fields
from outbox.cli.table import printable


def add_to(subcommands: Subcommands) -> None:
    """Add the command to the parser."""
    parser = subcommands.add_parser(
        "partitions", help="draw the partitions: past, today, ahead, and what is held"
    )
    add_database(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    url = url_of(arguments.database, "database", DATABASE_VARIABLE)
    with administration(url, application_name="outbox partitions") as connection:
        connection.execute("SET timezone = 'UTC'")
        found = read_partitions(connection)
    if arguments.json:
        tables = [
            {**policy_fields(policy), "partitions": [asdict(p) for p in partitions]}
            for policy, partitions in found.items()
        ]
        sys.stdout.write(f"{json.dumps(tables, indent=2, default=str)}\n")
    else:
        sys.stdout.write(f"{legend()}\n")
        for policy, partitions in found.items():
            sys.stdout.write(
                "\n"
                + "\n".join(map(printable, draw_timeline(policy, partitions)))
                + "\n"
            )
    return 0
