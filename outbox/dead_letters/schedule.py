"""Retry dead letters at intervals, in one replica at a time.

Every replica wakes at the same times, whole multiples of the interval since 1970, and
tries to take the same advisory lock. The replica that gets it retries the dead letters
that are due, and holds the lock a while longer, so that a replica whose clock is behind
finds it taken. If two run nevertheless, only one of them can lock each dead letter.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from outbox.dead_letters.events import (
    RetryRunEnded,
    RetryRunFailed,
    RetryRunSkipped,
    RetryRunWithheld,
)
from outbox.dead_letters.retry import Retrier, RetryCounts, find_due, retry_all
from outbox.dead_letters.statement import Schema
from outbox.duration import exact_duration
from outbox.errors import ConfigError, DatabaseUnavailableError, one_line
from outbox.events import Event
from outbox.postgres.advisory_lock import END_FOREIGN
from outbox.retry import RetryPolicy

_MAX_HOLD: Final = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySchedule:
    """When dead letters are retried automatically.

    Attributes:
        interval: the time between two runs.
        batch: the maximum number of retries in one run.
        max_retries: the maximum number of automatic retries of one dead letter; after
            that, retry it by hand.
        first_delay: the shortest delay after a failed retry.
        max_delay: the longest; slightly less than `interval`, or the dead letter would
            miss a run.
    """

    interval: timedelta = timedelta(hours=6)
    batch: int = 50
    max_retries: int = 240
    first_delay: timedelta = timedelta(minutes=10)
    max_delay: timedelta | None = None
    _policy: RetryPolicy = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the values."""
        if self.interval <= timedelta(0):
            raise ConfigError(
                f"interval={exact_duration(self.interval)}: must be above 0s"
            )
        for name in ("batch", "max_retries"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        longest = self.max_delay or self.interval * 0.9
        policy = RetryPolicy(
            max_attempts=self.max_retries,
            first_delay=min(self.first_delay, longest),
            max_delay=longest,
        )
        object.__setattr__(self, "_policy", policy)

    def delay(self, retry_count: int) -> timedelta | None:
        """Return the delay after this many failed retries; None if no more follow."""
        if self._policy.spent(retry_count):
            return None
        return self._policy.delay(retry_count)


def lost_turn(error: Exception) -> DatabaseUnavailableError:
    """Return the error for a lock that was lost or couldn't be requested."""
    return DatabaseUnavailableError(
        f"the lock of the retry schedule was lost: {one_line(error)}; another replica "
        "may run it now; no dead letter is retried by both"
    )


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
        """Take part in every run, until cancelled. No failure ends it."""
        interval = self._schedule.interval.total_seconds()
        hold = min(_MAX_HOLD.total_seconds(), interval / 10)
        turn = time.time() // interval
        while True:
            turn = max(turn + 1, time.time() // interval)
            await asyncio.sleep(max(0.0, turn * interval - time.time()))
            try:
                await self.run_due(hold=hold)
            except Exception as error:  # noqa: BLE001 (the next run may succeed)
                self._notify(
                    RetryRunFailed(schema=self._schema, reason=one_line(error))
                )

    async def run_due(self, *, hold: float = 0.0) -> RetryCounts | None:
        """Retry what is due; return None if another session holds the lock.

        Raises:
            BrokerUnavailableError, DatabaseUnavailableError: the broker or the database
                is unavailable.
        """
        async with self._open() as retrier, retrier.alone() as alone:
            if not alone:
                await self._report_holder(retrier)
                return None
            started = time.monotonic()
            candidates = await find_due(
                retrier,
                origin=self._origin,
                max_retries=self._schedule.max_retries,
                max_rows=self._schedule.batch,
            )
            tally = await retry_all(retrier, candidates)
            self._notify(
                RetryRunEnded(
                    schema=self._schema,
                    succeeded=tally.succeeded,
                    failed=tally.failed,
                    skipped=tally.skipped,
                    seconds=time.monotonic() - started,
                )
            )
            await asyncio.sleep(hold)
            return tally

    async def _report_holder(self, retrier: Retrier) -> None:
        foreign = await retrier.foreign_holders()
        if not foreign:
            self._notify(RetryRunSkipped(schema=self._schema))
            return
        self._notify(
            RetryRunWithheld(
                schema=self._schema,
                holders=tuple(map(str, foreign)),
                remedy=END_FOREIGN,
            )
        )
