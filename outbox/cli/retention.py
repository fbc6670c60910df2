"""`outbox retention`: show and set how long rows stay."""

import argparse
import json
import sys
from datetime import timedelta

from outbox.administration.connection import administration
from outbox.administration.retention import (
    INTERVALS,
    Policy,
    change_policy,
    parse_duration,
    read_policies,
)
from outbox.cli.command import DATABASE_VARIABLE, Subcommands, add_database, url_of
from outbox.errors import ConfigError
from outbox.postgres.late_messages import KEPT_FOR_LATECOMERS, minimum_retention


def add_to(subcommands: Subcommands) -> None:
    """Add the command to the parser."""
    parser = subcommands.add_parser(
        "retention", help="show or set how long rows stay, by table"
    )
    add_database(parser)
    parser.add_argument(
        "action",
        nargs="?",
        choices=["show", "set", "keep-table", "drop-table"],
        default="show",
        help="keep-table: after its detach keep the table of an expired partition;"
        " drop-table: drop it, as is the default",
    )
    parser.add_argument("table", nargs="?", help="outbox.message, or message")
    parser.add_argument("retention", nargs="?", help="set: 7d, 36h or 2w")
    parser.add_argument("--premake", type=int, metavar="N", help="partitions ahead")
    parser.add_argument("--interval", metavar="|".join(INTERVALS))
    parser.add_argument(
        "--minimum",
        metavar="DURATION",
        help="how long a message can come back, by your delays and retries; no"
        " retention below it is taken",
    )
    parser.add_argument(
        "--archive",
        metavar="SCHEMA.FUNCTION",
        help="a function to be called with schema, table, starts_at and ends_at before"
        " each drop; '' for none",
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
        "minimum_seconds": None
        if policy.minimum is None
        else int(policy.minimum.total_seconds()),
        "keep_table": policy.keep_table,
        "archive": policy.archive,
    }


def _run(arguments: argparse.Namespace) -> int:
    url = url_of(arguments.database, "database", DATABASE_VARIABLE)
    asked = {
        arguments.retention,
        arguments.premake,
        arguments.interval,
        arguments.minimum,
        arguments.archive,
    }
    if arguments.action == "set" and (not arguments.table or asked == {None}):
        raise ConfigError(
            "nothing to set: write outbox retention set TABLE 7d, or give --premake"
        )
    keeps = {"keep-table": True, "drop-table": False}.get(arguments.action)
    if keeps is not None and (not arguments.table or asked != {None}):
        raise ConfigError(
            f"{arguments.action} takes a table and no more: write"
            f" outbox retention {arguments.action} outbox.message"
        )
    if arguments.action == "show" and arguments.table:
        raise ConfigError("show takes no table: write outbox retention show")
    with administration(url, application_name="outbox retention") as connection:
        if arguments.action != "show":
            policies = [
                change_policy(
                    connection,
                    arguments.table,
                    retention=_duration(arguments.retention),
                    premake=arguments.premake,
                    interval=arguments.interval,
                    minimum=_duration(arguments.minimum),
                    keep_table=keeps,
                    archive=arguments.archive,
                )
            ]
        else:
            policies = read_policies(connection)
    if arguments.json:
        fields = [policy_fields(policy) for policy in policies]
        sys.stdout.write(f"{json.dumps(fields, indent=2)}\n")
    else:
        sys.stdout.write("".join(map(_line, policies)))
    if arguments.action == "set":
        sys.stderr.write("".join(map(_warning, policies)))
    return 0


def _duration(text: str | None) -> timedelta | None:
    return parse_duration(text) if text else None


def _warning(policy: Policy) -> str:
    needed = minimum_retention()
    if policy.parent_table not in KEPT_FOR_LATECOMERS or policy.retention >= needed:
        return ""
    return (
        f"outbox: {policy.parent_table} is kept {policy.retention}: give"
        f" Limits(max_delay=…) and the retries of relay and consumer such values that"
        f" no message comes later; by their defaults one can come after {needed}\n"
    )


def _line(policy: Policy) -> str:
    names = {span: name for name, span in INTERVALS.items()}
    interval = names.get(policy.span, str(policy.span))
    minimum = "" if policy.minimum is None else f"  at least {policy.minimum}"
    minimum += "  then kept as a table" if policy.keep_table else ""
    minimum += f"  archived by {policy.archive}" if policy.archive else ""
    return (
        f"{policy.parent_table:<20} {interval:<8} kept {policy.retention!s:<18}"
        f" {policy.premake:>3} ahead{minimum}\n"
    )
