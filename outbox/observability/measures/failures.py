"""Failures: refused messages, dead letters, and jobs without a worker."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from psycopg.rows import dict_row

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.dead_letters.statement import Schema
from pillarbox.outbox.logs.printable import count
from pillarbox.outbox.observability.measures.reading import NEW, Reading, Scope
from pillarbox.outbox.postgres.sql_files import load


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A message that was refused and waits for its next attempt.

    Attributes:
        key: the key that it blocks: later messages of that key wait, too. None if it
            waits alone.
        reader: the reader of the outbox whose broker refused it, or the consumer that
            failed to handle it.
        available_at: when it is tried again.
        last_error: why it was refused, if that was stored.
    """

    key: str | None
    lane: int
    id: UUID
    topic: str
    reader: str
    attempts: int
    created_at: datetime
    available_at: datetime
    last_error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """Messages that were refused and wait for their next attempt.

    Attributes:
        keys: how many keys these messages block.
        without_key: how many of the messages block no key.
        is_complete: whether the count ended before its limit; if not, there are more,
            also older ones.
        oldest: the oldest of the messages, oldest first.
    """

    keys: int = 0
    without_key: int = 0
    is_complete: bool = True
    oldest: tuple[Refused, ...] = ()

    @property
    def summary(self) -> str:
        """How many keys are blocked, and how many messages wait alone."""
        more = "" if self.is_complete else "at least "
        return (
            f"{more}{count(self.keys, 'blocked key')},"
            f" {count(self.without_key, 'refused message')} without a key"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Pending dead letters that failed for the same reason.

    Attributes:
        reason: the first 80 characters of the reason.
        new: how many were dead-lettered within the window.
        topic: one of their topics.
        age: the age of the oldest one.
    """

    reason: str
    origin: str
    pending: int
    new: int
    topics: int
    topic: str
    age: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetters:
    """The pending dead letters of one side.

    Attributes:
        pending: how many were counted, not only within the window; if `is_complete`,
            all of them.
        new: how many of them were dead-lettered within the window.
        is_complete: whether the count ended before its limit; if not, the newest ones
            were counted, and there are more.
        age: the age of the oldest one; None if there is none.
        reasons: the reasons, most frequent first.
    """

    side: Schema
    window: timedelta
    pending: int
    new: int
    is_complete: bool
    age: timedelta | None
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenJobs:
    """The jobs of a consumer that have not ended.

    Attributes:
        cancelling: how many were asked to stop and have not ended yet.
        abandoned: how many are running or cancelling, but their worker's lease expired.
        is_complete: whether the count ended before its limit.
    """

    consumer: str
    queued: int
    running: int
    cancelling: int
    abandoned: int
    is_complete: bool


def read_blocked(
    connection: AdministrationConnection, max_rows: int, *, most: int = Scope().rows
) -> Blocked:
    """Read which messages were refused and wait, and count them up to a number."""
    with connection.cursor(row_factory=dict_row) as cursor:
        values = {"max_rows": max_rows, "most": most}
        rows = cursor.execute(load("outbox", "list_refused"), values).fetchall()
    if not rows:
        return Blocked()
    names = Refused.__slots__
    return Blocked(
        **{name: it for name, it in rows[0].items() if name not in names},
        oldest=tuple(Refused(**{name: row[name] for name in names}) for row in rows),
    )


def read_dead_letters(reading: Reading, side: Schema) -> DeadLetters:
    """Count the pending dead letters of a side, by reason."""
    scope = reading.scope
    rows = reading.rows(
        load("outbox", "count_dead_letters").replace("{schema}", side),
        window=NEW,
        most=scope.rows,
    )
    counted = rows[0]["counted"] if rows else 0
    return DeadLetters(
        side=side,
        window=NEW,
        pending=min(counted, scope.rows),
        new=min(sum(row["new"] for row in rows), scope.rows),
        is_complete=counted <= scope.rows,
        age=rows[0]["age_of_all"] if rows else None,
        reasons=tuple(
            Reason(**{name: row[name] for name in Reason.__slots__})
            for row in rows[: scope.reasons]
        ),
    )


def read_jobs(reading: Reading) -> tuple[OpenJobs, ...]:
    """Count the open jobs of each consumer."""
    statement = load("outbox", "count_jobs")
    return reading.rows_of(OpenJobs, statement, most=reading.scope.rows)
