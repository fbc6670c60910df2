"""`pillarbox jobs` and `cancel`: the jobs of long handlers."""

from datetime import UTC, datetime
from typing import Annotated, Literal, TypeAlias

import typer

from pillarbox.inbox.jobs.control import (
    cancel_job,
    consumer_of_job,
    find_jobs,
    job_message_id,
    read_jobs,
)
from pillarbox.inbox.jobs.state import OPEN, JobState
from pillarbox.outbox.administration.sides import JobRow
from pillarbox.outbox.cli.command import (
    Database,
    Json,
    Limit,
    Reason,
    command,
    new_app,
    opened,
)
from pillarbox.outbox.cli.output import warn, write_json, write_line, write_table

_COLUMNS = ("state", "for", "attempts", "consumer", "topic", "message_id", "worker")
_RIGHTS = "grant the role pillarbox_consumer to its user"
_MOST = 100
_State: TypeAlias = Literal[
    "open",
    "any",
    "queued",
    "in_progress",
    "waiting",
    "success",
    "failure",
    "cancelled",
    "timed_out",
    "skipped",
]

jobs_app = new_app()
cancel_app = new_app()


@command(jobs_app)
def jobs(
    *,
    consumer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Jobs of this consumer.")
    ] = None,
    state: Annotated[_State, typer.Option(help="Jobs in this state.")] = "open",
    limit: Limit = _MOST,
    database: Database = None,
    json: Json = False,
) -> None:
    """List the jobs of long handlers."""
    states = {"open": OPEN, "any": tuple(JobState)}.get(state, (state,))
    with opened(database, "jobs", rights=_RIGHTS) as connection:
        rows = read_jobs(connection, consumer, states, limit or _MOST)
    if json:
        write_json(rows)
    else:
        now = datetime.now(UTC)
        write_table(_COLUMNS, [_row(job, now) for job in rows])


@command(cancel_app, epilog="Exit status 1: the job has already ended.")
def cancel(
    id: Annotated[str, typer.Argument(metavar="ID", help="Id of the message.")],
    *,
    consumer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Consumer of the job; required if several have one, or if the "
            "message has not arrived yet.",
        ),
    ] = None,
    reason: Reason = "",
    database: Database = None,
) -> int:
    """Cancel a message's job, whether it is running or queued.

    A message that is scheduled has no job yet: pillarbox scheduled cancel.
    """
    message_id = job_message_id(id)
    with opened(database, "jobs", rights=_RIGHTS) as connection:
        known = find_jobs(connection, message_id)
        name = consumer or consumer_of_job(message_id, known)
        state, worker = cancel_job(connection, message_id, name, reason or None)
    if state == JobState.CANCELLED and known.get(name) in OPEN:
        had = f": its worker {worker} is gone" if worker else ""
        write_line(
            f"{message_id} of {name} is cancelled{had}, and no worker is running it"
        )
        return 0
    if state != JobState.WAITING:
        write_line(f"{message_id} of {name} has already ended: {state}")
        return 1
    write_line(
        f"{message_id} of {name} will be cancelled: a running handler stops at its"
        " next heartbeat, and a queued job doesn't start"
    )
    if name not in known:
        warn(
            f"consumer {name!r} has no job for this message yet: a handler that isn't"
            " a job still handles it; if the message is scheduled, pillarbox"
            " scheduled cancel ID cancels it for all consumers"
        )
    return 0


def _row(job: JobRow, now: datetime) -> tuple[object, ...]:
    worker = job.worker
    if job.worker_is_gone:
        worker = f"{worker} (gone)"
    elif job.finished_at is None and job.lease_until is None:
        worker = None  # the job's previous worker
    return (
        job.state,
        now - job.since,
        job.attempts,
        job.consumer,
        job.topic,
        job.message_id,
        worker,
    )
