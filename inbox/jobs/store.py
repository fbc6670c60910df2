"""Jobs in the database: the leased receipts of long handlers.

queued ──take──▶ in_progress ──▶ success | failure | timed_out
▲   │                 │
│   │                 ├─ cancel requested ──▶ waiting ──▶ cancelled
└───┼── released ◀────┘
    └─ a receipt exists ──▶ skipped

A lease has a number, which is incremented whenever the job is taken. So a process that
was frozen for longer than its lease finds another number and can't commit. Each
transaction under a lease prolongs it. So a process also finds out if the server has
lost one, in a crash or a failover: then the lease ends earlier than it knows, or began
at another time. Every function runs in the transaction of the session that it is given.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from json import loads
from typing import Any, Final, cast
from uuid import UUID

from sqlalchemy import Row, TextClause, text
from sqlalchemy.orm import Session

from pillarbox.inbox.connection import connection_of
from pillarbox.inbox.handlers.outcome import (
    Cancelled,
    Handled,
    JobOutcome,
    Later,
    Spent,
)
from pillarbox.inbox.jobs.state import OPEN, JobState
from pillarbox.outbox.cloudevents.raw_text import storable, storable_reason
from pillarbox.outbox.message import Message
from pillarbox.outbox.message_id import moment_of
from pillarbox.outbox.postgres.sql_files import load

# Ensures that the lease has expired when a waiting process tries again.
_AGAIN: Final = 0.2
_SHOWN: Final = 16_384
"""How many characters of a text the table holds, which only shows it."""


@dataclass(frozen=True, slots=True)
class JobKey:
    """The key of a job: a message and a consumer."""

    id: UUID
    consumer: str

    @property
    def values(self) -> dict[str, Any]:
        """The parameters that identify the job in a statement."""
        return {"id": self.id, "at": moment_of(self.id), "consumer": self.consumer}


@dataclass(slots=True)
class Leased:
    """The job is leased to the calling process.

    Attributes:
        seconds: for how long, from the last renewal on.
        until: when the lease ends, according to the last transaction that committed.
    """

    key: JobKey
    number: int
    started_at: datetime
    seconds: float
    until: datetime
    attempts: int
    checkpoint: Any

    def renewed(self, until: datetime) -> None:
        """Record that a transaction has committed which prolonged the lease."""
        self.until = max(self.until, until)


def queue_job(session: Session, key: JobKey, message: Message) -> None:
    """Record that a message is waiting, or that it was already handled."""
    connection_of(session).execute(
        _statement("queue_job"),
        {
            **key.values,
            "topic": storable(message.topic)[:_SHOWN],
            "key": message.key and storable(message.key)[:_SHOWN],
            "tenant": message.tenant and storable(message.tenant)[:_SHOWN],
        },
    )


def take_job(
    session: Session, key: JobKey, worker: str, seconds: float
) -> Leased | JobOutcome:
    """Lease a job for this many seconds, or return why it can't be leased."""
    values = {**key.values, "worker": worker, "seconds": seconds}
    taken = connection_of(session).execute(_statement("take_job"), values).first()
    if taken is not None:
        checkpoint = None if taken.checkpoint is None else loads(taken.checkpoint)
        return Leased(
            key,
            taken.lease,
            taken.started_at,
            seconds,
            taken.lease_until,
            taken.attempts,
            checkpoint,
        )
    connection_of(session).execute(_statement("end_cancelled_job"), key.values)
    found = _read(session, key)
    match state := JobState(found.state):
        case JobState.CANCELLED:
            return Cancelled()
        case JobState.FAILURE | JobState.TIMED_OUT:
            # The process may have died before it wrote the dead letter.
            return Spent(found.attempts, found.reason)
    if state in OPEN:
        seconds = max(found.seconds or 0.0, 0.0) + _AGAIN
        return Later(timedelta(seconds=seconds), "another process has this job")
    return Handled(is_new=False)


def why_cancelled(session: Session, key: JobKey) -> str | None:
    """Return the reason why a job was cancelled; None if no reason was given."""
    return cast("str | None", _read(session, key).reason)


def reopen_job(session: Session, key: JobKey) -> None:
    """Reopen a job that failed or is queued, as if it had never been started.

    If a process died while running it, that start still counts.
    """
    connection_of(session).execute(_statement("reopen_job"), key.values)


def renew_job(
    session: Session, leased: Leased, checkpoint: str | None = None
) -> tuple[bool, datetime] | None:
    """Renew a lease; return whether to cancel the job, and when the lease ends.

    Return None if it is lost. Until the transaction ends, no other process can lease
    the job.

    Args:
        checkpoint: one to save, as JSON.
    """
    renewed = _run(session, "renew_job", leased, checkpoint=checkpoint)
    return None if renewed is None else (renewed.is_cancelled, renewed.lease_until)


def finish_job(
    session: Session,
    leased: Leased,
    state: JobState,
    *,
    attempts: int,
    reason: str | None = None,
) -> bool:
    """End a job permanently; return False if the lease is lost."""
    reason = reason and storable_reason(reason)
    values = {"state": state.value, "reason": reason, "attempts": attempts}
    return _run(session, "finish_job", leased, **values) is not None


def return_job(
    session: Session,
    leased: Leased,
    reason: str | None,
    state: JobState,
    *,
    is_failed: bool,
) -> bool:
    """Release a job; return False if the lease is lost.

    Only a failure counts as an attempt. A job in the state FAILURE doesn't wait for
    another start, but can be reopened.
    """
    reason = reason and storable_reason(reason)
    values = {"reason": reason, "is_failed": is_failed, "state": state.value}
    return _run(session, "return_job", leased, **values) is not None


def _read(session: Session, key: JobKey) -> Row[Any]:
    return connection_of(session).execute(_statement("read_job"), key.values).one()


def _run(
    session: Session, name: str, leased: Leased, **values: object
) -> Row[Any] | None:
    mine = {
        **leased.key.values,
        "lease": leased.number,
        "started_at": leased.started_at,
        "seconds": leased.seconds,
        "until": leased.until,
    }
    statement = _statement(name)
    return connection_of(session).execute(statement, {**mine, **values}).first()


@cache
def _statement(name: str) -> TextClause:
    return text(load("inbox", name))
