"""Run the benchmarks and print one table; exit with status 1 if a target is missed."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib import import_module

import psycopg

from benchmarks import broker_costs
from benchmarks.brokers import BROKERS
from benchmarks.conditions import SERVER_SETTINGS, Conditions
from benchmarks.measure import Answer, table
from pillarbox.outbox.errors import OutboxError
from pillarbox.outbox.testing.postgres import PostgresServer, postgres_server

QUESTIONS = (
    "relay_to_nothing",
    "open_writers",
    "scale",
    "trace",
    "status",
    "commands",
    "retention_stall",
    "large_drop",
    "disk",
    "settling",
    "takeover",
    "topic_readers",
    "slow_handlers",
    *BROKERS,
    "faststream",
    "aio_pika",
    "nats_client",
    "fair_share",
    "blocked_keys",
    "hostile_rows",
    "guard",
    "batch_handlers",
    "handlers",
    "observers",
    "postgres_source",
    "fan_out",
    "writer",
    "doorbell",
    "handled",
    "processes",
    "way",
    "whole_way",
    "shards",
    "web",
    "memory",
)
USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        with (
            postgres_server(arguments.database_url, settings=SERVER_SETTINGS) as server,
            closing(Conditions(server=server, quick=arguments.quick)) as conditions,
        ):
            machine = describe(server)
            answers = list(ask(arguments.names or QUESTIONS, conditions))
    except OutboxError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return USAGE_ERROR
    print(f"{machine}{'; quick look: figures are rough' if arguments.quick else ''}\n")
    print(table(answers))
    return int(any(answer.missed for answer in answers))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure speed and memory, compared with other libraries.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="question", help=f"of {', '.join(QUESTIONS)}"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer messages, 2 runs: a rough look"
    )
    parser.add_argument(
        "--database-url",
        default=os.environ.get("PILLARBOX_DATABASE_URL"),
        help="a server to use instead of a private one; its role must be superuser",
    )
    arguments = parser.parse_args(argv)
    for name in arguments.names:
        if name not in QUESTIONS:
            parser.error(f"question {name!r} is none of {', '.join(QUESTIONS)}")
    return arguments


def ask(names: Sequence[str], conditions: Conditions) -> Iterator[Answer]:
    for name in names:
        print(f"{name} …", file=sys.stderr)
        if name in BROKERS:
            yield from broker_costs.answers(BROKERS[name], conditions)
        else:
            yield from import_module(f"benchmarks.{name}").answers(conditions)


def describe(server: PostgresServer) -> str:
    with psycopg.connect(server.url) as connection:
        version = connection.info.parameter_status("server_version")
    python = platform.python_version()
    return f"PostgreSQL {version}, Python {python}, {os.cpu_count()} processors"


if __name__ == "__main__":
    sys.exit(main())
