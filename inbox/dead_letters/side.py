"""The inbox's part of repair: retries by handlers."""

from contextlib import AbstractAsyncContextManager, suppress
from typing import Final
from uuid import UUID

import psycopg

from pillarbox.inbox.jobs.control import cancel_job, read_jobs
from pillarbox.inbox.jobs.state import OPEN, JobState
from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.sides import Jobs, RetryOptions, Side
from pillarbox.outbox.dead_letters.retry import Retrier
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.events import Observer
from pillarbox.outbox.logs.printable import for_shell
from pillarbox.outbox.message_id import is_uuid7, moment_of
from pillarbox.outbox.postgres.sql_files import load


def record_discard(
    connection: AdministrationConnection, message_id: str, origin: str
) -> None:
    """Record a receipt, so that a redelivery of the message calls no handler.

    If its day has no partition, no receipt is needed: the message would be too old. A
    job that is still open is ended.

    Raises:
        ConfigError: its long handler is running.
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
            f"message {id} is being retried by {worker[0]}: end the retry and discard"
            f" the dead letter with pillarbox cancel {id} --consumer"
            f" {for_shell(consumer)}"
        )
    with suppress(psycopg.errors.CheckViolation), connection.transaction():
        connection.execute(load("inbox", "record_discard"), values)


def _lacks(options: RetryOptions) -> str | None:
    if options.consumer is None:
        return "inbox dead letters: pass --consumer MODULE:NAME to run its handlers"
    return None


def _open_retrier(
    options: RetryOptions, notify: Observer
) -> AbstractAsyncContextManager[Retrier]:
    # Only a retry needs SQLAlchemy, which takes as long as the rest of a command.
    from pillarbox.inbox.consuming.load import load_consumer

    assert options.consumer is not None
    return load_consumer(options.consumer).retrier(options.schedule, notify)


SIDE: Final = Side(
    schema="inbox",
    lacks=_lacks,
    open_retrier=_open_retrier,
    on_discard=record_discard,
    jobs=Jobs(
        states=tuple(JobState),
        open_states=OPEN,
        read=read_jobs,
        cancel=lambda *values: cancel_job(*values)[0],
    ),
)
