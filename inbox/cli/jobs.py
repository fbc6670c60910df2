"""`inbox jobs` and `inbox cancel`: what long handlers have to do, or need not."""

import argparse
import json
import sys
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import dict_row

from inbox.jobs.store import OPEN, JobState
from outbox.cli.command import DATABASE_VARIABLE, Subcommands, add_database, url_of
from outbox.cli.table import draw_table, printable
from outbox.errors import ConfigError, DatabaseUnavailableError, one_line, shorten
from outbox.message_id import is_uuid7, moment_of
from outbox.postgres.connection import PIN_SESSION_LOCALLY, conninfo
from outbox.postgres.sql_files import load
from outbox.url import without_password

_COLUMNS = ("state", "for", "attempts", "consumer", "topic", "message_id", "worker")


def add_to(subcommands: Subcommands) -> None:
    """Add the commands to the parser."""
    jobs = subcommands.add_parser("jobs", help="list the jobs of long handlers")
    add_database(jobs)
    jobs.add_argument("--consumer", metavar="NAME", help="of this consumer only")
    jobs.add_argument(
        "--state",
        action="append",
        choices=[state.value for state in JobState],
        help="in this state; may be repeated (by default those that are open)",
    )
    jobs.add_argument("--all", action="store_true", help="in any state")
    jobs.add_argument("--limit", type=int, default=100, metavar="N")
    jobs.add_argument("--json", action="store_true", help="print JSON")
    jobs.set_defaults(run=_list)
    cancel = subcommands.add_parser(
        "cancel", help="cancel a message's job, running anywhere or still queued"
    )
    add_database(cancel)
    cancel.add_argument("id", metavar="ID", help="the message's id")
    cancel.add_argument(
        "--consumer",
        metavar="NAME",
        help="whose job; needed if several have one, or if the message is to come yet",
    )
    cancel.add_argument("--reason", metavar="TEXT", help="kept in the job")
    cancel.set_defaults(run=_cancel)


def _list(arguments: argparse.Namespace) -> int:
    if arguments.limit < 1:
        raise ConfigError(f"limit={arguments.limit}: must be at least 1")
    states = arguments.state or [state.value for state in OPEN]
    found = _query(
        arguments,
        "list_jobs",
        consumer=arguments.consumer,
        states=None if arguments.all else states,
        max_rows=arguments.limit,
    )
    if arguments.json:
        sys.stdout.write(f"{json.dumps(found, indent=2, default=str)}\n")
    else:
        now = datetime.now(UTC)
        sys.stdout.write(draw_table(_COLUMNS, [_row(job, now) for job in found]))
    return 0


def _cancel(arguments: argparse.Namespace) -> int:
    try:
        id = UUID(arguments.id)
    except ValueError:
        id = UUID(int=0)
    if not is_uuid7(id):
        raise ConfigError(
            f"id {shorten(arguments.id)}: isn't a UUIDv7; inbox jobs lists the ids"
        )
    known = {
        row["consumer"]: JobState(row["state"])
        for row in _query(arguments, "find_jobs", id=id, at=moment_of(id))
    }
    consumer = arguments.consumer or _whose(id, known)
    (row,) = _query(
        arguments,
        "cancel_job",
        id=id,
        at=moment_of(id),
        consumer=consumer,
        reason=arguments.reason,
    )
    named = printable(consumer)
    if row["state"] == JobState.CANCELLED and known.get(consumer) in OPEN:
        had = f": its worker {row['worker']} is gone" if row["worker"] else ""
        said = printable(f"{id} of {consumer} is cancelled{had}, and nobody has it now")
        sys.stdout.write(f"{said}\n")
        return 0
    if row["state"] != JobState.WAITING:
        sys.stdout.write(f"{id} of {named} has ended already: {row['state']}\n")
        return 1
    sys.stdout.write(
        f"{id} of {named} is to be cancelled: a running handler learns it with its "
        "next heartbeat, one that was not begun never begins\n"
    )
    if consumer not in known:
        sys.stderr.write(
            f"warning: consumer {consumer!r} has no job of it yet. When its message "
            "comes to a handler with a lease, it ends there; one without a lease "
            "handles it all the same\n"
        )
    return 0


def _whose(id: UUID, known: dict[str, JobState]) -> str:
    """Choose the consumer that is meant: whose job is open, or the only one.

    Raises:
        ConfigError: there is none, or more than one.
    """
    meant = [name for name, state in known.items() if state in OPEN] or list(known)
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise ConfigError(
            f"id {id}: {', '.join(meant)} have a job of it; say whose by --consumer"
        )
    raise ConfigError(
        f"id {id}: no consumer has a job of it; if its message is to come yet, say "
        "to whom by --consumer"
    )


def _query(
    arguments: argparse.Namespace, name: str, **parameters: Any
) -> list[dict[str, Any]]:
    url = url_of(arguments.database, "database", DATABASE_VARIABLE)
    try:
        with psycopg.connect(
            conninfo(url), application_name="inbox jobs", row_factory=dict_row
        ) as connection:
            connection.execute(PIN_SESSION_LOCALLY)
            return connection.execute(load("inbox", name), parameters).fetchall()
    except psycopg.errors.CheckViolation as error:
        raise ConfigError(
            f"id {parameters['id']}: inbox.job has no partition for its day: it is too "
            "old, or of a clock that is ahead"
        ) from error
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
        raise ConfigError(
            f"database {without_password(url)} has no table inbox.job: run outbox "
            "migrate --database URL for it"
        ) from error
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigError(
            f"database {without_password(url)}: {one_line(error)}; grant the role "
            "pillarbox_consumer to its user"
        ) from error
    except psycopg.OperationalError as error:
        raise DatabaseUnavailableError(one_line(error)) from error


def _row(job: dict[str, Any], now: datetime) -> tuple[str | None, ...]:
    since = {
        JobState.QUEUED: job["queued_at"],
        JobState.IN_PROGRESS: job["started_at"],
        JobState.WAITING: job["cancel_requested_at"],
    }.get(JobState(job["state"]), job["finished_at"])
    passed = str(now - since).partition(".")[0]
    worker = job["worker"]
    if job["worker_is_gone"]:
        worker = f"{worker} (gone)"
    elif job["finished_at"] is None and job["lease_until"] is None:
        worker = None  # it had the job before
    return (
        job["state"],
        passed,
        str(job["attempts"]),
        job["consumer"],
        job["topic"],
        str(job["message_id"]),
        worker,
    )
