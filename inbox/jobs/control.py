"""List and cancel jobs, on behalf of a person."""

from collections.abc import Sequence
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from pillarbox.inbox.jobs.state import OPEN, JobState
from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.sides import JobRow
from pillarbox.outbox.errors import ConfigError, shorten
from pillarbox.outbox.message_id import is_uuid7, moment_of
from pillarbox.outbox.postgres.sql_files import load


def job_message_id(text: str) -> UUID:
    """Read the id of a message that can have a job.

    Raises:
        ConfigError: it isn't a UUIDv7.
    """
    try:
        id = UUID(text)
    except ValueError:
        id = UUID(int=0)
    if not is_uuid7(id):
        raise ConfigError(
            f"id {shorten(text)}: isn't a UUIDv7; pillarbox jobs lists the ids"
        )
    return id


def consumer_of_job(id: UUID, known: dict[str, JobState]) -> str:
    """Choose the consumer: the one with an open job, or else the only one with a job.

    Raises:
        ConfigError: there is none, or more than one.
    """
    meant = [name for name, state in known.items() if state in OPEN] or list(known)
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise ConfigError(
            f"id {id}: {', '.join(meant)} each have a job with this id; choose one"
            " with --consumer"
        )
    raise ConfigError(
        f"id {id}: no consumer has a job with this id; if the message has not arrived"
        " yet, name its consumer with --consumer"
    )


def read_jobs(
    connection: AdministrationConnection,
    consumer: str | None,
    states: Sequence[str],
    limit: int,
) -> list[JobRow]:
    """Return jobs in these states, open ones first, then the newest."""
    values = {"consumer": consumer, "states": list(states), "max_rows": limit}
    with connection.cursor(row_factory=class_row(JobRow)) as cursor:
        return cursor.execute(load("inbox", "list_jobs"), values).fetchall()


def find_jobs(connection: AdministrationConnection, id: UUID) -> dict[str, JobState]:
    """Return the states of a message's jobs, by consumer."""
    values = {"id": id, "at": moment_of(id)}
    rows = connection.execute(load("inbox", "find_jobs"), values)
    return {consumer: JobState(state) for consumer, state in rows}


def cancel_job(
    connection: AdministrationConnection, id: UUID, consumer: str, reason: str | None
) -> tuple[str, str | None]:
    """Request that a message's job be cancelled; return its state and its worker.

    Raises:
        ConfigError: no such job can exist.
    """
    values = {
        "id": job_message_id(str(id)),
        "at": moment_of(id),
        "consumer": consumer,
        "reason": reason,
    }
    try:
        ((state, worker),) = connection.execute(load("inbox", "cancel_job"), values)
    except psycopg.errors.CheckViolation as error:
        raise ConfigError(
            f"id {id}: inbox.job has no partition for its day; the id is too old, or"
            " from a clock that is ahead"
        ) from error
    return str(state), worker
