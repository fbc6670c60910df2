"""`pillarbox jobs` and `cancel`: the jobs of long handlers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID

import psycopg
import typer
from psycopg.rows import class_row

from inbox.jobs.store import OPEN, JobState
from outbox.administration.connection import AdministrationConnection, errors_explained
from outbox.administration.sides import JobRow
from outbox.cli.command import Database, Json, command, database_url, new_app
from outbox.cli.output import warn, write_json, write_line, write_table
from outbox.duration import write_duration
from outbox.errors import ConfigError, shorten
from outbox.message_id import is_uuid7, moment_of
from outbox.postgres.connection import PIN_SESSION_LOCALLY, conninfo
from outbox.postgres.sql_files import load

_COLUMNS = ("state", "for", "attempts", "consumer", "topic", "message_id", "worker")

jobs_app = new_app()
cancel_app = new_app()


@command(jobs_app)
def jobs(
    *,
    consumer: Annotated[
        str | None,
        typer.Option("--consumer", metavar="NAME", help="Jobs of this consumer."),
    ] = None,
    state: Annotated[
        list[JobState] | None,
        typer.Option(
            "--state",
            help="Jobs in this state; may be repeated.",
            show_default="those that are open",
        ),
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="Jobs in any state.")] = False,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, help="Maximum number.")
    ] = 100,
    database: Database = None,
    json: Json = False,
) -> None:
    """List the jobs of long handlers."""
    states = [each.value for each in (JobState if all else state or OPEN)]
    with _connected(database) as connection:
        found = [asdict(job) for job in read_jobs(connection, consumer, states, limit)]
    if json:
        write_json(found)
    else:
        now = datetime.now(UTC)
        write_table(_COLUMNS, [_row(job, now) for job in found])


@command(cancel_app, epilog="Exit status 1: the job had ended already.")
def cancel(
    id: Annotated[str, typer.Argument(metavar="ID", help="Id of the message.")],
    *,
    consumer: Annotated[
        str | None,
        typer.Option(
            "--consumer",
            metavar="NAME",
            help="Consumer of the job; required if several have one, or if the "
            "message has not arrived yet.",
        ),
    ] = None,
    reason: Annotated[
        str | None,
        typer.Option("--reason", metavar="TEXT", help="Why; stored in the job."),
    ] = None,
    database: Database = None,
) -> int:
    """Cancel a message's job, whether it is running or queued."""
    message_id = _message_id(id)
    values = {"id": message_id, "at": moment_of(message_id)}
    with _connected(database, id=message_id) as connection:
        known = {
            name: JobState(state)
            for name, state in connection.execute(load("inbox", "find_jobs"), values)
        }
        name = consumer or _whose(message_id, known)
        state, worker = _cancel(connection, message_id, name, reason)
    if state == JobState.CANCELLED and known.get(name) in OPEN:
        had = f": its worker {worker} is gone" if worker else ""
        write_line(f"{message_id} of {name} is cancelled{had}, and no worker runs it")
        return 0
    if state != JobState.WAITING:
        write_line(f"{message_id} of {name} has already ended: {state}")
        return 1
    write_line(
        f"{message_id} of {name} will be cancelled: a running handler is told with "
        "its next heartbeat; one that has not started never starts"
    )
    if name not in known:
        warn(
            f"consumer {name!r} has no job for it yet. If its message reaches a "
            "handler with a lease, the job ends there; a handler without a lease "
            "handles it anyway"
        )
    return 0


def _message_id(text: str) -> UUID:
    try:
        id = UUID(text)
    except ValueError:
        id = UUID(int=0)
    if not is_uuid7(id):
        raise ConfigError(
            f"id {shorten(text)}: isn't a UUIDv7; pillarbox jobs lists the ids"
        )
    return id


def _whose(id: UUID, known: dict[str, JobState]) -> str:
    """Choose the consumer: the one with an open job, or else the only one with a job.

    Raises:
        ConfigError: there is none, or more than one.
    """
    meant = [name for name, state in known.items() if state in OPEN] or list(known)
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise ConfigError(
            f"id {id}: {', '.join(meant)} have a job for it; choose with --consumer"
        )
    raise ConfigError(
        f"id {id}: no consumer has a job for it; if the message has not arrived yet, "
        "name its consumer with --consumer"
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


def cancel_job(
    connection: AdministrationConnection, id: UUID, consumer: str, reason: str | None
) -> str:
    """Request that a message's job be cancelled, and return the job's state.

    Raises:
        ConfigError: no such job can exist.
    """
    if not is_uuid7(id):
        raise ConfigError(f"id {id}: isn't a UUIDv7; pillarbox jobs lists the ids")
    try:
        return str(_cancel(connection, id, consumer, reason)[0])
    except psycopg.errors.CheckViolation as error:
        raise _no_partition(id) from error


def _cancel(
    connection: AdministrationConnection, id: UUID, consumer: str, reason: str | None
) -> tuple[str, str | None]:
    values = {"id": id, "at": moment_of(id), "consumer": consumer, "reason": reason}
    ((state, worker),) = connection.execute(load("inbox", "cancel_job"), values)
    return state, worker


def _no_partition(id: UUID | None) -> ConfigError:
    return ConfigError(
        f"id {id}: inbox.job has no partition for its day: it is too old, or of a "
        "clock that is ahead"
    )


@contextmanager
def _connected(
    database: str | None, id: UUID | None = None
) -> Iterator[AdministrationConnection]:
    url = database_url(database)
    with (
        errors_explained(url, "grant the role pillarbox_consumer to its user"),
        psycopg.connect(conninfo(url), application_name="pillarbox jobs") as connection,
    ):
        connection.execute(PIN_SESSION_LOCALLY)
        # JIT compilation of a plan for many partitions would take seconds.
        connection.execute("SET LOCAL jit = off")
        try:
            yield connection
        except psycopg.errors.CheckViolation as error:
            raise _no_partition(id) from error


def _row(job: Mapping[str, Any], now: datetime) -> tuple[str | None, ...]:
    since = {
        JobState.QUEUED: job["queued_at"],
        JobState.IN_PROGRESS: job["started_at"],
        JobState.WAITING: job["cancel_requested_at"],
    }.get(JobState(job["state"]), job["finished_at"])
    worker = job["worker"]
    if job["worker_is_gone"]:
        worker = f"{worker} (gone)"
    elif job["finished_at"] is None and job["lease_until"] is None:
        worker = None  # the job's previous worker
    return (
        job["state"],
        write_duration(now - since),
        str(job["attempts"]),
        job["consumer"],
        job["topic"],
        str(job["message_id"]),
        worker,
    )
