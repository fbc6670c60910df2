"""Outcomes are collected, written in order, and never dropped."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest

from pillarbox.inbox.consuming.outcomes import Outcomes
from pillarbox.outbox.errors import BrokerUnavailableError


class Written:
    """Records the batches written, after failing a given number of times."""

    def __init__(self, *, failures: int = 0) -> None:
        self.batches: list[list[int]] = []
        self._failures = failures

    async def __call__(self, batch: Sequence[int]) -> None:
        if self._failures:
            self._failures -= 1
            raise BrokerUnavailableError("away")
        self.batches.append(list(batch))


async def test_writes_during_a_batch_form_the_next_batch() -> None:
    written = Written()
    outcomes = Outcomes(written, max_batch=3)
    for number in range(7):
        outcomes.add(number)
    outcomes.close()
    await outcomes.run()
    assert written.batches == [[0, 1, 2], [3, 4, 5], [6]]


async def test_an_unavailable_broker_loses_nothing() -> None:
    written = Written(failures=2)
    outcomes = Outcomes(written)
    outcomes.add(1)
    writing = asyncio.create_task(outcomes.run())
    outcomes.add(2)
    outcomes.close()
    await writing
    assert [number for batch in written.batches for number in batch] == [1, 2]


async def test_after_repeated_failures_a_check_decides_until_one_succeeds() -> None:
    written = Written(failures=5)
    outcomes = Outcomes(written)
    writing = asyncio.create_task(outcomes.run())
    outcomes.add(1)
    told: list[str] = []
    async with asyncio.timeout(60):
        while not written.batches:
            try:
                await outcomes.check()
            except BrokerUnavailableError as error:
                told.append(str(error))
            # Like a receive, which waits for the broker.
            await asyncio.wait({writing}, timeout=0.01)
    # A check reports nothing until several attempts have failed in a row.
    assert 0 < len(told) <= 3
    assert set(told) == {"can't record outcomes: away"}
    await outcomes.check()
    outcomes.close()
    await writing


async def test_with_many_writes_the_first_failure_is_enough() -> None:
    failed = asyncio.Event()

    async def fail(batch: Sequence[int]) -> None:
        failed.set()
        raise BrokerUnavailableError("away")

    outcomes = Outcomes(fail, max_batch=2)
    for number in range(20):
        outcomes.add(number)
    writing = asyncio.create_task(outcomes.run())
    await failed.wait()
    with pytest.raises(BrokerUnavailableError, match="away"):
        await outcomes.check()
    writing.cancel()
    await asyncio.wait({writing})


async def test_a_check_returns_when_the_writer_ends() -> None:
    failures = iter([BrokerUnavailableError("away")] * 4)

    async def fail(batch: Sequence[int]) -> None:
        raise next(failures, RuntimeError("bug"))

    outcomes = Outcomes(fail)
    outcomes.add(1)
    writing = asyncio.create_task(outcomes.run())
    async with asyncio.timeout(60):
        while not writing.done():
            with suppress(BrokerUnavailableError):
                await outcomes.check()
            await asyncio.wait({writing}, timeout=0.01)
    assert isinstance(writing.exception(), RuntimeError)


async def test_an_error_of_the_writer_ends_the_task() -> None:
    async def fail(batch: Sequence[int]) -> None:
        raise RuntimeError("bug")

    outcomes = Outcomes(fail)
    outcomes.add(1)
    with pytest.raises(RuntimeError, match="bug"):
        await outcomes.run()
