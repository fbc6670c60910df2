"""Retries respect their rate, and their schedule runs at multiples of its interval."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

import pytest

from pillarbox import uuid7
from pillarbox.outbox.dead_letters.retry import Candidate, Outcome, retry_all
from pillarbox.outbox.dead_letters.schedule import RetrySchedule, Scheduler
from pillarbox.outbox.dead_letters.statement import Statement
from pillarbox.outbox.testing.events import RecordedEvents


class Clock:
    """A clock that only sleep, retries and runs advance; it starts at an odd time."""

    def __init__(self) -> None:
        self.now = 1234.5

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("retry", "schedule"):
        monkeypatch.setattr(f"pillarbox.outbox.dead_letters.{module}.time", clock)
        monkeypatch.setattr(f"pillarbox.outbox.dead_letters.{module}.asyncio", clock)
    return clock


class FakeRetrier:
    """Retries anything and records when; each retry takes a given time."""

    def __init__(self, clock: Clock, *takes: float) -> None:
        self.start_times: list[float] = []
        self.origin = None
        self._clock = clock
        self._start = clock.now
        self._takes = iter(takes)

    async def retry(self, candidate: Candidate) -> Outcome:
        self.start_times.append(self._clock.now - self._start)
        self._clock.now += next(self._takes)
        return Outcome.SUCCEEDED

    async def fetch(
        self, name: Statement, parameters: Mapping[str, Any]
    ) -> Sequence[Sequence[Any]]:
        raise AssertionError(name)


async def start_times(clock: Clock, rate: float | None, *takes: float) -> list[float]:
    retrier = FakeRetrier(clock, *takes)
    candidates = [Candidate(uuid7(), datetime.now(UTC)) for _ in takes]
    tally = await retry_all(retrier, candidates, max_per_second=rate)
    assert tally == Counter(succeeded=len(takes))
    return retrier.start_times


async def test_retries_start_no_sooner_than_the_rate_allows(clock: Clock) -> None:
    assert await start_times(clock, 2, 0.0, 0.1, 0.4, 0.0) == [0.0, 0.5, 1.0, 1.5]


async def test_a_slow_retry_is_not_followed_by_a_burst(clock: Clock) -> None:
    assert await start_times(clock, 2, 3.0, 0.0, 0.0) == [0.0, 3.0, 3.5]


async def test_without_a_rate_there_is_no_wait(clock: Clock) -> None:
    assert await start_times(clock, None, 0.0, 0.25, 0.0) == [0.0, 0.0, 0.25]


async def run_starts(clock: Clock, *takes: float) -> list[float]:
    """Return when runs start that fail after these times, and when the next does."""
    starts, durations = [], iter(takes)

    def open_retrier() -> NoReturn:
        starts.append(clock.now)
        duration = next(durations, None)
        if duration is None:
            raise asyncio.CancelledError
        clock.now += duration
        raise OSError

    scheduler = Scheduler(
        open_retrier,
        RetrySchedule(interval=timedelta(minutes=1)),
        schema="outbox",
        origin=None,
        notify=RecordedEvents(),
    )
    with pytest.raises(asyncio.CancelledError):
        await scheduler.run()
    return starts


async def test_a_schedule_runs_once_at_each_turn_although_runs_fail(
    clock: Clock,
) -> None:
    assert await run_starts(clock, 0.0, 59.0) == [1260.0, 1320.0, 1380.0]


async def test_a_run_that_lasts_too_long_is_followed_by_one_at_once(
    clock: Clock,
) -> None:
    assert await run_starts(clock, 130.0, 0.0) == [1260.0, 1390.0, 1440.0]
