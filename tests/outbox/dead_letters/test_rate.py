"""Retries respect their rate, however long each of them takes."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from outbox.dead_letters import Candidate, Outcome, Statement
from outbox.dead_letters.retry import RetryCounts, retry_all
from pillarbox import uuid7


class Clock:
    """A clock that only sleep and retries advance; it starts at an odd time."""

    def __init__(self) -> None:
        self.now = 1234.5

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("outbox.dead_letters.retry.time", clock)
    monkeypatch.setattr("outbox.dead_letters.retry.asyncio", clock)
    return clock


async def start_times(clock: Clock, rate: float | None, *takes: float) -> list[float]:
    retrier = FakeRetrier(clock, *takes)
    candidates = [Candidate(uuid7(), datetime.now(UTC)) for _ in takes]
    tally = await retry_all(retrier, candidates, max_per_second=rate)
    assert tally == RetryCounts(succeeded=len(takes))
    return retrier.start_times


async def test_retries_start_no_sooner_than_the_rate_allows(clock: Clock) -> None:
    assert await start_times(clock, 2, 0.0, 0.1, 0.4, 0.0) == [0.0, 0.5, 1.0, 1.5]


async def test_a_slow_retry_is_not_followed_by_a_burst(clock: Clock) -> None:
    assert await start_times(clock, 2, 3.0, 0.0, 0.0) == [0.0, 3.0, 3.5]


async def test_without_a_rate_there_is_no_wait(clock: Clock) -> None:
    assert await start_times(clock, None, 0.0, 0.25, 0.0) == [0.0, 0.0, 0.25]
