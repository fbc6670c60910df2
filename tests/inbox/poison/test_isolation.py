"""An isolated handler and the others wait for each other, up to a limit."""

import asyncio
from datetime import timedelta

from pillarbox.inbox.poison.isolation import Isolation
from tests.fixtures.waiting import answer_after

LONG = timedelta(seconds=60)


class Worker:
    """A task that runs until the test ends it."""

    def __init__(self, isolation: Isolation, *, exclusive: bool = False) -> None:
        self.began = asyncio.Event()
        self._may_end = asyncio.Event()
        self._way = isolation.exclusive() if exclusive else isolation.shared()
        self._task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        async with self._way:
            self.began.set()
            await self._may_end.wait()

    async def begin(self) -> None:
        async with asyncio.timeout(60):
            await self.began.wait()

    async def end(self) -> None:
        self._may_end.set()
        async with asyncio.timeout(60):
            await self._task


async def test_an_isolated_handler_and_the_others_wait_for_each_other() -> None:
    isolation = Isolation(LONG)
    before = Worker(isolation)
    await before.begin()
    alone = Worker(isolation, exclusive=True)
    after = Worker(isolation)
    await answer_after(0.02)
    assert not alone.began.is_set()
    assert not after.began.is_set()
    await before.end()
    await alone.begin()
    await answer_after(0.02)
    assert not after.began.is_set()
    await alone.end()
    await after.begin()
    await after.end()


async def test_two_isolated_handlers_run_one_after_the_other() -> None:
    isolation = Isolation(LONG)
    one, other = Worker(isolation, exclusive=True), Worker(isolation, exclusive=True)
    await one.begin()
    await answer_after(0.02)
    assert not other.began.is_set()
    await one.end()
    await other.begin()
    await other.end()


async def test_no_handler_waits_longer_than_the_limit() -> None:
    isolation = Isolation(timedelta(milliseconds=10))
    before = Worker(isolation)
    await before.begin()
    alone = Worker(isolation, exclusive=True)
    await alone.begin()
    after, other = Worker(isolation), Worker(isolation, exclusive=True)
    await after.begin()
    await other.begin()
    for worker in (before, alone, after, other):
        await worker.end()


async def test_a_rebalance_does_not_wait_for_a_long_handler() -> None:
    isolation = Isolation(LONG)
    async with isolation.shared(counts=False):
        alone = Worker(isolation, exclusive=True)
        await alone.begin()
        await alone.end()
