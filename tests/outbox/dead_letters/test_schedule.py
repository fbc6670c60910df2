"""A schedule runs at each multiple of its interval."""

import asyncio
from datetime import timedelta
from typing import NoReturn

import pytest

from outbox.dead_letters.schedule import RetrySchedule, Scheduler
from outbox.testing.events import RecordedEvents


class Clock:
    """A clock that only sleep and runs advance; it starts at an odd time."""

    def __init__(self) -> None:
        self.now = 1234.5

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def run_starts(monkeypatch: pytest.MonkeyPatch, *takes: float) -> list[float]:
    """Return when runs start that fail after these times, and when the next does."""
    clock, starts, durations = Clock(), [], iter(takes)
    monkeypatch.setattr("outbox.dead_letters.schedule.time", clock)
    monkeypatch.setattr("outbox.dead_letters.schedule.asyncio", clock)

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


async def test_it_runs_once_at_each_turn_although_runs_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await run_starts(monkeypatch, 0.0, 59.0) == [1260.0, 1320.0, 1380.0]


async def test_a_run_that_lasts_too_long_is_followed_by_one_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await run_starts(monkeypatch, 130.0, 0.0) == [1260.0, 1390.0, 1440.0]
