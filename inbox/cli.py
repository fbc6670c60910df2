"""`inbox`: handle what was published."""

import argparse
import importlib
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import psycopg

from inbox.commands import jobs
from inbox.consumer import Consumer
from inbox.handle import one_line
from inbox.receipt import check_text
from inbox.routes import check_topic
from inbox.subscribe import subscribe, unsubscribe
from outbox.command import (
    DATABASE_VARIABLE,
    add_database,
    command,
    run_coroutine,
    run_until_stopped,
    url_of,
)
from outbox.command import main as run_command
from outbox.database import Connection, connect, without_password
from outbox.errors import ConfigError, DatabaseUnavailableError
from outbox.observers.logging import LogEvents

_LAST_WAIT: Final = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; give its exit status."""
    parser = command("inbox", __doc__)
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = subcommands.add_parser("run", help="handle messages until SIGTERM")
    run.add_argument(
        "consumer",
        metavar="MODULE:NAME",
        help="where the Consumer is, or a function that gives one",
    )
    run.set_defaults(run=_run)
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
    return run_command(parser, lambda arguments: arguments.run(arguments), argv)


def load_consumer(path: str) -> Consumer:
    """Import the consumer that `module:name` names.

    Raises:
        ConfigError: the path is none, or there is no consumer.
    """
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        raise ConfigError(f"consumer {path!r}: write module:name, e.g. app:consumer")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"consumer {path!r}: can't import {module_name!r}: {one_line(error)}"
        ) from error
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if callable(found) and not isinstance(found, Consumer):
        found = found()
    if not isinstance(found, Consumer):
        raise ConfigError(
            f"consumer {path!r}: {name!r} in {module_name!r} is "
            f"{'not there' if found is None else f'a {type(found).__name__}'}, "
            "and should be an inbox.Consumer"
        )
    return found


def _run(arguments: argparse.Namespace) -> int:
    sys.path.insert(0, "")  # as `python -m` does: the user's modules are there
    consumer = load_consumer(arguments.consumer)
    consumer.observe(LogEvents())
    status = run_until_stopped(consumer)
    _leave_stuck_handlers(consumer.name, status)
    return status


def _leave_stuck_handlers(consumer: str, status: int) -> None:
    """Exit in spite of threads that did not end; the server rolls them back."""
    threads = [
        t for t in threading.enumerate() if t.name.startswith(f"inbox {consumer}")
    ]
    for thread in threads:
        thread.join(_LAST_WAIT / len(threads))
    stuck = sum(thread.is_alive() for thread in threads)
    if stuck:
        logging.getLogger("pillarbox").warning(
            "%d handlers did not end in time; their transactions are rolled back", stuck
        )
        logging.shutdown()
        os._exit(status)


def _change_topics(
    change: Callable[[Connection, str, Sequence[str]], Awaitable[str]],
    arguments: argparse.Namespace,
) -> int:
    check_text("consumer", arguments.consumer)
    for topic in arguments.topics:
        check_topic(topic)
    url = url_of(arguments.database, "database", DATABASE_VARIABLE)

    async def run() -> None:
        async with await connect(url, application_name="pillarbox inbox") as connection:
            try:
                said = await change(connection, arguments.consumer, arguments.topics)
            except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
                raise ConfigError(
                    f"database {without_password(url)} has no table "
                    "inbox.subscription: run outbox migrate for it"
                ) from None
            except psycopg.Error as error:
                raise DatabaseUnavailableError(
                    f"database {without_password(url)}: {error}"
                ) from error
        print(said)

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
