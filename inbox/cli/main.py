"""`inbox`: handle what was published."""

import argparse
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import psycopg

from inbox.cli import dead_letters, jobs, run
from inbox.handlers.routes import check_topic
from inbox.receipt import check_text
from inbox.subscriptions import subscribe, unsubscribe
from outbox.cli.command import (
    DATABASE_VARIABLE,
    add_database,
    command,
    run_coroutine,
    url_of,
)
from outbox.cli.command import main as run_command
from outbox.cli.table import printable
from outbox.errors import ConfigError, DatabaseUnavailableError, message_of
from outbox.postgres.connection import Connection, connect
from outbox.url import without_password


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; give its exit status."""
    parser = command("inbox", __doc__)
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    run.add_to(subcommands)
    for name, change, meaning in (
        ("subscribe", _subscribe, "have the postgres broker deliver topics"),
        ("unsubscribe", _unsubscribe, "have it deliver them no longer"),
    ):
        topics = subcommands.add_parser(name, help=f"{meaning} to a consumer")
        add_database(topics)
        topics.add_argument("consumer", metavar="CONSUMER")
        topics.add_argument(
            "topics",
            metavar="TOPIC",
            nargs="+",
            help="a topic, or a beginning: 'orders.*'",
        )
        topics.set_defaults(run=partial(_change_topics, change))
    jobs.add_to(subcommands)
    dead_letters.add_to(subcommands)
    return run_command(parser, lambda arguments: arguments.run(arguments), argv)


def _change_topics(
    change: Callable[[Connection, str, Sequence[str]], Awaitable[str]],
    arguments: argparse.Namespace,
) -> int:
    check_text("consumer", arguments.consumer)
    for topic in arguments.topics:
        check_topic(topic)
    url = url_of(arguments.database, "database", DATABASE_VARIABLE)

    async def run() -> None:
        async with await connect(
            url, application_name="pillarbox inbox", shared=True
        ) as connection:
            try:
                said = await change(connection, arguments.consumer, arguments.topics)
            except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
                raise ConfigError(
                    f"database {without_password(url)} has no table "
                    "inbox.subscription: run outbox migrate for it"
                ) from None
            except psycopg.Error as error:
                raise DatabaseUnavailableError(
                    f"database {without_password(url)}: {message_of(error)}"
                ) from error
        print(printable(said))

    return run_coroutine(run())


async def _subscribe(
    connection: Connection, consumer: str, topics: Sequence[str]
) -> str:
    await subscribe(connection, consumer, topics)
    return f"{consumer} is subscribed to {', '.join(topics)}"


async def _unsubscribe(
    connection: Connection, consumer: str, topics: Sequence[str]
) -> str:
    ended = await unsubscribe(connection, consumer, topics)
    if not ended:
        return f"{consumer} was subscribed to none of {', '.join(topics)}"
    return (
        f"{consumer} is no longer subscribed to {', '.join(ended)}; "
        "what was delivered stays"
    )
