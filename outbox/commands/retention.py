"""`outbox retention`: show and set how long rows stay."""

import argparse
import json
import sys

from outbox.administration import administration
from outbox.command import DATABASE_VARIABLE, Subcommands, add_database, url_of
from outbox.errors import ConfigError
from outbox.retention import (
    INTERVALS,
    Policy,
    change_policy,
    parse_duration,
    read_policies,
)


def add_to(subcommands: Subcommands) -> None:
    """Add the command to the parser."""
    parser = subcommands.add_parser(
        "retention", help="show or set how long rows stay, by table"
    )
    add_database(parser)
    parser.add_argument("action", nargs="?", choices=["show", "set"], default="show")
    parser.add_argument("table", nargs="?", help="set: outbox.message, or message")
    parser.add_argument("retention", nargs="?", help="set: 7d, 36h or 2w")
    parser.add_argument("--premake", type=int, metavar="N", help="partitions ahead")
    parser.add_argument("--interval", metavar="|".join(INTERVALS))
    parser.add_argument(
        "--force",
        action="store_true",
        help="keep receipts or jobs for less than a message can come back",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def policy_fields(policy: Policy) -> dict[str, object]:
    """Give a policy as JSON has it: durations in seconds."""
    return {
        "table": policy.parent_table,
        "interval_seconds": int(policy.span.total_seconds()),
        "retention_seconds": int(policy.retention.total_seconds()),
        "premake": policy.premake,
    }


def _run(arguments: argparse.Namespace) -> int:
    url = url_of(arguments.database, "database", DATABASE_VARIABLE)
    asked = (arguments.retention, arguments.premake, arguments.interval)
    if arguments.action == "set" and (not arguments.table or asked == (None,) * 3):
        raise ConfigError(
            "nothing to set: write outbox retention set TABLE 7d, or give --premake"
        )
    if arguments.action == "show" and arguments.table:
        raise ConfigError("show takes no table: write outbox retention show")
    with administration(url, application_name="outbox retention") as connection:
        if arguments.action == "set":
            policies = [
                change_policy(
                    connection,
                    arguments.table,
                    retention=parse_duration(arguments.retention)
                    if arguments.retention
                    else None,
                    premake=arguments.premake,
                    interval=arguments.interval,
                    force=arguments.force,
                )
            ]
        else:
            policies = read_policies(connection)
    if arguments.json:
        fields = [policy_fields(policy) for policy in policies]
        sys.stdout.write(f"{json.dumps(fields, indent=2)}\n")
    else:
        sys.stdout.write("".join(map(_line, policies)))
    return 0


def _line(policy: Policy) -> str:
    names = {span: name for name, span in INTERVALS.items()}
    interval = names.get(policy.span, str(policy.span))
    return (
        f"{policy.parent_table:<20} {interval:<8} kept {policy.retention!s:<18}"
        f" {policy.premake:>3} ahead\n"
    )
