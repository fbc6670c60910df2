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
from datetime import datetime
from enum import StrEnum
from functools import cache
from json import dumps, loads
from typing import Any, Final, TypeAlias, cast
from uuid import UUID

from sqlalchemy import Row, TextClause, select, text
from sqlalchemy.orm import Session

from inbox.connection import connection_of
from inbox.schema import receipt_table
from outbox.cloudevents.raw_text import storable
from outbox.message import Message
from outbox.message_id import moment_of
from outbox.postgres.sql_files import load

_SHOWN: Final = 16_384
"""How many characters of a text the table holds, which only shows it."""


class JobState(StrEnum):
    """The state of a job."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    WAITING = "waiting"
    SUCCESS = "success"
    FAILURE = "failure"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    SKIPPED = "skipped"


OPEN: Final = (JobState.QUEUED, JobState.IN_PROGRESS, JobState.WAITING)


@dataclass(frozen=True, slots=True)
class JobKey:
    """The key of a job: a message and a consumer."""

    id: UUID
    consumer: str

    @property
    def at(self) -> datetime:
        """The timestamp in the message's id, by which the table is partitioned."""
        return moment_of(self.id)

    @property
    def values(self) -> dict[str, Any]:
        """The parameters that identify the job in a statement."""
        return {"id": self.id, "at": self.at, "consumer": self.consumer}


@dataclass(slots=True)
class Leased:
    """The job is leased to the calling process.

    Attributes:
        seconds: for how long, from the last renewal on.
        until: when the lease ends, according to the last transaction that committed.
    """

    number: int
    started_at: datetime
    seconds: float
    until: datetime
    attempts: int
    checkpoint: Any

    def renewed(self, until: datetime) -> None:
        """Record that a transaction has committed which prolonged the lease."""
        self.until = max(self.until, until)


@dataclass(frozen=True, slots=True)
class Busy:
    """Another process holds the job, for this many seconds if it doesn't renew."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The job has ended, and there is nothing left to do."""

    state: JobState
    attempts: int
    reason: str | None


Taking: TypeAlias = Leased | Busy | Finished


def queue_job(session: Session, key: JobKey, message: Message) -> None:
    """Record that a message is waiting, or that it was already handled."""
    receipt = select(receipt_table.c.message_id).filter_by(
        message_id=key.id, message_at=key.at, consumer=key.consumer
    )
    connection_of(session).execute(
        _statement("queue_job"),
        {
            **key.values,
            "topic": storable(message.topic)[:_SHOWN],
            "key": message.key and storable(message.key)[:_SHOWN],
            "tenant": message.tenant and storable(message.tenant)[:_SHOWN],
            "is_known": connection_of(session).execute(receipt).first() is not None,
        },
    )


def take_job(session: Session, key: JobKey, worker: str, seconds: float) -> Taking:
    """Lease a job for this many seconds, or return why it can't be leased."""
    values = {**key.values, "worker": worker, "seconds": seconds}
    taken = connection_of(session).execute(_statement("take_job"), values).first()
    if taken is not None:
        checkpoint = None if taken.checkpoint is None else loads(taken.checkpoint)
        return Leased(
            taken.lease,
            taken.started_at,
            seconds,
            taken.lease_until,
            taken.attempts,
            checkpoint,
        )
    connection_of(session).execute(_statement("end_cancelled_job"), key.values)
    found = _read(session, key)
    state = JobState(found.state)
    if state in OPEN:
        return Busy(max(found.seconds or 0.0, 0.0))
    return Finished(state, found.attempts, found.reason)


def why_cancelled(session: Session, key: JobKey) -> str | None:
    """Return the reason why a job was cancelled; None if no reason was given."""
    return cast("str | None", _read(session, key).reason)


def reopen_job(session: Session, key: JobKey) -> None:
    """Reopen a job that failed or is queued, as if it had never been started.

    If a process died while running it, that start still counts.
    """
    connection_of(session).execute(_statement("reopen_job"), key.values)


def renew_job(
    session: Session, key: JobKey, leased: Leased
) -> tuple[bool, datetime] | None:
    """Renew a lease; return whether to cancel the job, and when the lease ends.

    Return None if it is lost.
    """
    renewed = _run(session, "renew_job", key, leased)
    return None if renewed is None else (renewed.is_cancelled, renewed.lease_until)


def hold_job(session: Session, key: JobKey, leased: Leased) -> datetime | None:
    """Hold the lease until the transaction ends; return when the lease ends.

    Return None if it is lost.
    """
    held = _run(session, "hold_job", key, leased)
    return None if held is None else cast("datetime", held.lease_until)


def finish_job(
    session: Session,
    key: JobKey,
    leased: Leased,
    state: JobState,
    *,
    attempts: int,
    reason: str | None = None,
) -> bool:
    """End a job permanently; return False if the lease is lost."""
    values = {"state": state.value, "reason": reason, "attempts": attempts}
    return _run(session, "finish_job", key, leased, **values) is not None


def return_job(
    session: Session,
    key: JobKey,
    leased: Leased,
    reason: str | None,
    *,
    is_failed: bool,
    state: JobState = JobState.QUEUED,
) -> bool:
    """Release a job; return False if the lease is lost.

    Only a failure counts as an attempt. A job in the state FAILURE doesn't wait for
    another start, but can be reopened.
    """
    values = {"reason": reason, "is_failed": is_failed, "state": state.value}
    return _run(session, "return_job", key, leased, **values) is not None


def save_checkpoint(
    session: Session, key: JobKey, leased: Leased, checkpoint: object
) -> datetime | None:
    """Save a checkpoint as JSON; return as `hold_job` does."""
    values = {"checkpoint": dumps(checkpoint, allow_nan=False)}
    saved = _run(session, "save_checkpoint", key, leased, **values)
    return None if saved is None else cast("datetime", saved.lease_until)


def _read(session: Session, key: JobKey) -> Row[Any]:
    return connection_of(session).execute(_statement("read_job"), key.values).one()


def _run(
    session: Session, name: str, key: JobKey, leased: Leased, **values: object
) -> Row[Any] | None:
    mine = {
        "lease": leased.number,
        "started_at": leased.started_at,
        "seconds": leased.seconds,
        "until": leased.until,
    }
    found = connection_of(session).execute(
        _statement(name), {**key.values, **mine, **values}
    )
    return found.first()


@cache
def _statement(name: str) -> TextClause:
    return text(load("inbox", name))
