"""Who is at work beside whom."""

import asyncio
from datetime import timedelta

from inbox.poison.isolation import Solitude
from tests.fixtures.waiting import answer_after

LONG = timedelta(seconds=60)


class Worker:
    """A task that works until it is told to end."""

    def __init__(self, solitude: Solitude, *, alone: bool = False) -> None:
        self.began = asyncio.Event()
        self._may_end = asyncio.Event()
        self._way = solitude.alone() if alone else solitude.among_others()
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


async def test_others_work_side_by_side() -> None:
    solitude = Solitude(LONG)
    one, other = Worker(solitude), Worker(solitude)
    await one.begin()
    await other.begin()
    await one.end()
    await other.end()


async def test_one_alone_waits_for_the_others_and_they_for_it() -> None:
    solitude = Solitude(LONG)
    before = Worker(solitude)
    await before.begin()
    lone = Worker(solitude, alone=True)
    after = Worker(solitude)
    await answer_after(0.02)
    assert not lone.began.is_set()
    assert not after.began.is_set()
    await before.end()
    await lone.begin()
    await answer_after(0.02)
    assert not after.began.is_set()
    await lone.end()
    await after.begin()
    await after.end()


async def test_two_are_alone_one_after_the_other() -> None:
    solitude = Solitude(LONG)
    one, other = Worker(solitude, alone=True), Worker(solitude, alone=True)
    await one.begin()
    await answer_after(0.02)
    assert not other.began.is_set()
    await one.end()
    await other.begin()
    await other.end()


async def test_nobody_waits_for_long() -> None:
    solitude = Solitude(timedelta(milliseconds=10))
    before = Worker(solitude)
    await before.begin()
    lone = Worker(solitude, alone=True)
    await lone.begin()
    after, other = Worker(solitude), Worker(solitude, alone=True)
    await after.begin()
    await other.begin()
    for worker in (before, lone, after, other):
        await worker.end()


async def test_who_takes_hours_is_not_waited_for() -> None:
    solitude = Solitude(LONG)
    async with solitude.among_others(counts=False):
        lone = Worker(solitude, alone=True)
        await lone.begin()
        await lone.end()
