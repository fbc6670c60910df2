"""Tasks end when they are cancelled, and none is left running."""

import asyncio

import pytest

from pillarbox.outbox import gather as module
from pillarbox.outbox.gather import end, gather


async def swallow(times: int, waiting: asyncio.Barrier) -> None:
    """Swallow this many cancellations, as `asyncio.wait_for` does by mistake."""
    await waiting.wait()
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not times:
                raise
            times -= 1


async def test_a_task_that_swallows_a_cancellation_is_cancelled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CANCEL_AGAIN", 0.01)
    waiting = asyncio.Barrier(4)
    tasks = [asyncio.create_task(swallow(times, waiting)) for times in (0, 1, 3)]
    await waiting.wait()
    async with asyncio.timeout(60):
        await end(tasks)
    assert all(task.cancelled() for task in tasks)


async def test_an_exception_raised_by_an_ending_task_is_ignored() -> None:
    waiting = asyncio.Event()

    async def fail() -> None:
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("failed")

    tasks = [asyncio.create_task(fail())]
    await waiting.wait()
    await end(tasks)
    await end([])
    assert isinstance(tasks[0].exception(), ValueError)


async def test_a_failing_task_ends_the_others_before_its_error_is_raised() -> None:
    waiting = asyncio.Event()
    ended = []

    async def wait() -> None:
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def fail() -> None:
        await waiting.wait()
        raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        await gather([wait(), fail()])
    assert ended == [True]
