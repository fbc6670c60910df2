"""Retry dead letters at intervals.

Every replica wakes at whole multiples of the interval since 1970, so that a restart
postpones no run. It leases dead letters that are due: until the next run they are not
due for other replicas.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from pillarbox.outbox.dead_letters.events import RetryRunEnded, RetryRunFailed
from pillarbox.outbox.dead_letters.retry import Candidate, Retrier, retry_all
from pillarbox.outbox.dead_letters.statement import Schema, Statement
from pillarbox.outbox.errors import one_line
from pillarbox.outbox.events import Event
from pillarbox.outbox.retry import RetryPolicy

_FIRST_DELAY: Final = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySchedule:
    """When dead letters are retried automatically.

    Attributes:
        interval: the time between two runs.
        batch: the maximum number of retries in one run of one replica.
        max_retries: the maximum number of automatic retries of one dead letter; after
            that, retry it by hand.
    """

    interval: timedelta = timedelta(hours=6)
    batch: int = 50
    max_retries: int = 240

    @property
    def longest_delay(self) -> timedelta:
        """Slightly less than the interval, or a dead letter would miss a run."""
        return self.interval * 0.9

    def delay(self, retry_count: int) -> timedelta | None:
        """Return the delay after this many failed retries; None if no more follow."""
        policy = RetryPolicy(
            max_attempts=self.max_retries,
            first_delay=min(_FIRST_DELAY, self.longest_delay),
            max_delay=self.longest_delay,
        )
        return None if policy.spent(retry_count) else policy.delay(retry_count)


class Scheduler:
    """Runs a schedule. For one event loop.

    Args:
        open_retrier: called for each run.
        origin: the origin of the dead letters; None for all of the schema.
    """

    def __init__(
        self,
        open_retrier: Callable[[], AbstractAsyncContextManager[Retrier]],
        schedule: RetrySchedule,
        *,
        schema: Schema,
        origin: str | None,
        notify: Callable[[Event], None],
    ) -> None:
        self._open = open_retrier
        self._schedule = schedule
        self._schema = schema
        self._origin = origin
        self._notify = notify

    async def run(self) -> None:
        """Run at every turn, until cancelled. No failure ends it."""
        interval = self._schedule.interval.total_seconds()
        turn = time.time() // interval
        while True:
            turn = max(turn + 1, time.time() // interval)
            await asyncio.sleep(max(0.0, turn * interval - time.time()))
            try:
                await self.run_due()
            except Exception as error:  # noqa: BLE001 (the next run may succeed)
                self._notify(
                    RetryRunFailed(schema=self._schema, reason=one_line(error))
                )

    async def run_due(self) -> Counter[str]:
        """Retry due letters that no other replica is retrying; count the outcomes.

        Raises:
            BrokerUnavailableError, DatabaseUnavailableError: the broker or the database
                is unavailable.
        """
        started = time.monotonic()
        async with self._open() as retrier:
            values = {
                "origin": self._origin,
                "max_retries": self._schedule.max_retries,
                "max_rows": self._schedule.batch,
                "lease": self._schedule.longest_delay.total_seconds(),
            }
            due = await retrier.fetch(Statement.LEASE_DUE, values)
            tally = await retry_all(retrier, [Candidate(*row) for row in due])
        self._notify(
            RetryRunEnded(
                schema=self._schema,
                **tally,
                seconds=time.monotonic() - started,
            )
        )
        return tally
