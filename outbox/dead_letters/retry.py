"""Retry dead letters: one after the other, each in a transaction of its own.

PENDING ──it went well──▶ SUCCEEDED
PENDING ──it failed──▶ PENDING, retry_count + 1, a new reason, retry_after
PENDING ──the broker or the database is away──▶ untouched
PENDING ──given up by a person──▶ DISCARDED
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from outbox.dead_letters.criteria import Criteria
from outbox.dead_letters.statement import Statement


class Candidate(NamedTuple):
    """A dead letter that is to be retried, unless somebody else does."""

    id: UUID
    created_at: datetime


class Outcome(Enum):
    """What a retry came to; SKIPPED: somebody else had it, or it is settled."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How many retries came to what."""

    succeeded: int = 0
    failed: int = 0
    skipped: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.succeeded + self.failed + self.skipped


class Retrier(Protocol):
    """Retries the dead letters of one side. For one task at a time."""

    async def fetch(
        self, name: Statement, parameters: Mapping[str, Any]
    ) -> Sequence[Sequence[Any]]:
        """Run a statement in a transaction of its own, and give its rows.

        Raises:
            DatabaseUnavailableError: the database is away.
        """

    async def retry(self, candidate: Candidate) -> Outcome:
        """Retry one dead letter and write down what came of it.

        Raises:
            BrokerUnavailableError, DatabaseUnavailableError: nothing was written, and
                no retry is counted.
        """

    def alone(self) -> AbstractAsyncContextManager[bool]:
        """Tell, and keep it so for the block, whether no other replica's turn it is."""


async def find(retrier: Retrier, criteria: Criteria) -> list[Candidate]:
    """Find what meets the criteria, the oldest first."""
    rows = await retrier.fetch(Statement.FIND, criteria.parameters())
    return [Candidate(*row) for row in rows]


async def find_due(
    retrier: Retrier, *, origin: str | None, max_retries: int, max_rows: int
) -> list[Candidate]:
    """Find what the schedule is to retry, the longest due first."""
    rows = await retrier.fetch(
        Statement.FIND_DUE,
        {"origin": origin, "max_retries": max_retries, "max_rows": max_rows},
    )
    return [Candidate(*row) for row in rows]


async def retry_all(
    retrier: Retrier,
    candidates: Sequence[Candidate],
    *,
    max_per_second: float | None = None,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> Tally:
    """Retry dead letters in this order, not faster than asked.

    Raises:
        BrokerUnavailableError, DatabaseUnavailableError: those left are untouched.
    """
    counts: Counter[str] = Counter()
    earliest = time.monotonic()
    for candidate in candidates:
        if max_per_second is not None:
            early = earliest - time.monotonic()
            if early > 0:
                await asyncio.sleep(early)
            # What took long is not made up for: the next ones would come in a rush.
            earliest = max(earliest, time.monotonic()) + 1 / max_per_second
        outcome = await retrier.retry(candidate)
        counts[outcome.value] += 1
        on_outcome(outcome)
    return Tally(**counts)
