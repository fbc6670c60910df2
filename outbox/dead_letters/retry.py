"""Retry dead letters: one at a time, each in its own transaction.

PENDING ──the retry succeeded──▶ SUCCEEDED
PENDING ──the retry failed──▶ PENDING, retry_count + 1, a new reason, retry_after
PENDING ──the broker or the database is unavailable──▶ unchanged
PENDING ──the schedule leases it──▶ PENDING, retry_after at the end of the lease
PENDING ──an operator discards it──▶ DISCARDED
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from pillarbox.outbox.dead_letters.events import DeadLetterFailed, DeadLetterSucceeded
from pillarbox.outbox.dead_letters.letter import Letter
from pillarbox.outbox.dead_letters.statement import Schema, Statement


class Candidate(NamedTuple):
    """A dead letter to retry or discard, unless another process does so first."""

    id: UUID
    created_at: datetime

    def parameters(self) -> dict[str, Any]:
        """Return the parameters by which statements find it."""
        # As text, which every driver accepts for a uuid.
        return {"id": str(self.id), "created_at": self.created_at}


class Outcome(Enum):
    """The outcome of a retry; SKIPPED: another process holds it, or it is settled."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a retry failed, as it is stored and reported.

    Attributes:
        delay: the delay that the broker or the handler asked for; if given, no failed
            retry is counted, and the schedule doesn't apply.
    """

    reason: str
    stacktrace: str | None = None
    delay: timedelta | None = None

    def retry_count(self, letter: Letter) -> int:
        """Return how many retries of the dead letter have failed, with this one."""
        return letter.retry_count + (self.delay is None)

    def parameters(
        self, letter: Letter, schedule: Callable[[int], timedelta | None]
    ) -> dict[str, Any]:
        """Return the parameters of `Statement.MARK_PENDING`.

        Args:
            schedule: returns the delay after a number of failed retries.
        """
        count = self.retry_count(letter)
        delay = schedule(count) if self.delay is None else self.delay
        return {
            **Candidate(letter.id, letter.created_at).parameters(),
            "retry_count": letter.retry_count,
            "charge": count - letter.retry_count,
            "reason": self.reason,
            "stacktrace": self.stacktrace,
            "delay": None if delay is None else delay.total_seconds(),
        }


def outcome_event(
    schema: Schema, letter: Letter, failure: Failure | None
) -> DeadLetterSucceeded | DeadLetterFailed:
    """Return the event that reports a retry; it succeeded if there is no failure."""
    about: dict[str, Any] = {
        "schema": schema,
        "id": letter.id,
        "message_id": letter.message_id,
        "topic": letter.topic,
    }
    if failure is None:
        return DeadLetterSucceeded(**about)
    count = failure.retry_count(letter)
    return DeadLetterFailed(**about, retry_count=count, reason=failure.reason)


class Retrier(Protocol):
    """Retries the dead letters of one side. For one task at a time."""

    @property
    def origin(self) -> str | None:
        """The only origin whose dead letters it retries; None for all of its side."""

    async def fetch(
        self, name: Statement, parameters: Mapping[str, Any]
    ) -> Sequence[Sequence[Any]]:
        """Run a statement in a transaction of its own, and return its rows.

        Raises:
            DatabaseUnavailableError: the database is unavailable.
        """

    async def retry(self, candidate: Candidate) -> Outcome:
        """Retry one dead letter and record the outcome.

        Raises:
            BrokerUnavailableError, DatabaseUnavailableError: nothing was written, and
                no retry is counted.
        """


async def retry_all(
    retrier: Retrier,
    candidates: Sequence[Candidate],
    *,
    max_per_second: float | None = None,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> Counter[str]:
    """Retry dead letters in this order, at most `max_per_second`.

    Returns:
        The number of each outcome.

    Raises:
        BrokerUnavailableError, DatabaseUnavailableError: the rest is unchanged.
    """
    counts = Counter({outcome.value: 0 for outcome in Outcome})
    earliest = time.monotonic()
    for candidate in candidates:
        if max_per_second is not None:
            early = earliest - time.monotonic()
            if early > 0:
                await asyncio.sleep(early)
            # Don't catch up after a slow retry: the next ones would run in a burst.
            earliest = max(earliest, time.monotonic()) + 1 / max_per_second
        outcome = await retrier.retry(candidate)
        counts[outcome.value] += 1
        on_outcome(outcome)
    return counts
