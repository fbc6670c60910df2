"""What fails: refused messages, dead letters, and jobs without a worker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from outbox.administration.sides import Blocked, BlockedCount, Side
from outbox.dead_letters.statement import Schema
from outbox.observability.measures.reading import NEW, Reading
from outbox.postgres.sql_files import load


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedSummary:
    """Messages that were refused and wait for their next attempt.

    Attributes:
        keys: how many keys these messages block.
        without_key: how many of the messages block no key.
        oldest: the oldest of the messages, oldest first.
    """

    side: Schema
    keys: int
    without_key: int
    oldest: tuple[Blocked, ...]


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
    reading: Reading, side: Side, refused: Mapping[Schema, int | None]
) -> BlockedSummary:
    """Read which messages were refused and wait.

    Args:
        refused: how many were counted before, by side. If none was, the log isn't read
            again, which takes time.
    """
    counted = BlockedCount(0, 0)
    oldest: Sequence[Blocked] = ()
    if refused[side.schema] != 0:
        counted = side.read_blocked_count(reading.connection)
    if counted.keys or counted.without_key:
        oldest = side.read_blocked(reading.connection, reading.scope.blocked)
    return BlockedSummary(
        side=side.schema,
        keys=counted.keys,
        without_key=counted.without_key,
        oldest=tuple(oldest),
    )


def read_dead_letters(reading: Reading, side: Side) -> DeadLetters:
    """Count the pending dead letters of a side, by reason."""
    scope = reading.scope
    rows = reading.rows(
        load("outbox", "count_dead_letters").replace("{schema}", side.schema),
        window=NEW,
        most=scope.rows,
    )
    counted = rows[0]["counted"] if rows else 0
    return DeadLetters(
        side=side.schema,
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
