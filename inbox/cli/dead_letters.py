"""`inbox dead-letters`: what consumers gave up."""

import argparse
import sys
from contextlib import AbstractAsyncContextManager, suppress
from uuid import UUID

import psycopg

from inbox.cli.run import load_consumer, scheduler_of
from outbox.administration.connection import AdministrationConnection
from outbox.cli.command import Subcommands
from outbox.cli.dead_letter_options import add_schedule, schedule_of
from outbox.cli.dead_letters import Side
from outbox.cli.dead_letters import add_to as add_dead_letters
from outbox.dead_letters import Retrier, RetrySchedule, Tally
from outbox.errors import ConfigError
from outbox.events import Observer, Observers
from outbox.message_id import is_uuid7, moment_of
from outbox.observability.logging import LogEvents
from outbox.postgres.sql_files import load


def add_to(subcommands: Subcommands) -> None:
    """Add the commands to the parser."""
    add_dead_letters(
        subcommands,
        Side(
            schema="inbox",
            add_retry=_add_retry,
            open_retrier=_open_retrier,
            take_turn=_take_turn,
            on_discard=record_discard,
        ),
    )


def record_discard(
    connection: AdministrationConnection, message_id: str, origin: str
) -> None:
    """Record a receipt: should the message come again, its handler is not called.

    Without a partition for its day there is no need, for it would be too old. A job
    that was left open ends.

    Raises:
        ConfigError: its long handler is just at work.
    """
    try:
        id = UUID(message_id)
    except ValueError:
        return
    if not is_uuid7(id):
        return
    consumer = origin.removeprefix("consumer:")
    values = {"id": id, "at": moment_of(id), "consumer": consumer}
    connection.execute(load("inbox", "end_discarded_job"), values)
    worker = connection.execute(load("inbox", "find_worker"), values).fetchone()
    if worker is not None:
        raise ConfigError(
            f"the dead letter of message {id} is being retried by {worker[0]}, in a "
            f"long handler: inbox cancel {id} --consumer {consumer} ends that, and "
            "discards it"
        )
    with suppress(psycopg.errors.CheckViolation), connection.transaction():
        connection.execute(load("inbox", "record_discard"), values)


def _add_retry(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "consumer",
        metavar="MODULE:NAME",
        help="where the Consumer is, whose handlers are called",
    )
    add_schedule(parser)


def _open_retrier(
    arguments: argparse.Namespace, notify: Observer
) -> AbstractAsyncContextManager[Retrier]:
    sys.path.insert(0, "")  # as `python -m` does: the user's modules are there
    consumer = load_consumer(arguments.consumer)
    return consumer.retrier(schedule_of(arguments), notify)


async def _take_turn(arguments: argparse.Namespace, notify: Observer) -> Tally | None:
    sys.path.insert(0, "")
    schedule = schedule_of(arguments) or RetrySchedule()
    consumer = load_consumer(arguments.consumer)
    notify = Observers([LogEvents(), notify]).notify
    return await scheduler_of(consumer, schedule, notify).take_turn()
