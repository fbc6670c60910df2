"""Run calls concurrently, all or nothing, and let them be cancelled at any time."""

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

T = TypeVar("T")

_CANCEL_AGAIN: Final = 5.0
"""Seconds; longer than a task needs to clean up."""


async def gather(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run calls concurrently; return their results in order, or raise the first error.

    It leaves no task running after an error or a cancellation. A `TaskGroup` does the
    same, but in Python 3.11 one that fails leaves its task marked as cancelled, so that
    timeouts around it later surface as cancellations.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await end(tasks)
        raise


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended; drop the exceptions they raise.

    A task that keeps running is cancelled again, because some libraries swallow a
    cancellation that arrives together with a result, such as psycopg before 3.3 on
    Python 3.11.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN)
        for task in done:
            if not task.cancelled():
                task.exception()  # retrieved, or asyncio would log it


@contextmanager
def cancellable() -> Iterator[None]:
    """At the end of the block, raise a cancellation that was swallowed in it.

    For third-party code: `asyncio.wait_for` in Python 3.11 swallows a cancellation that
    arrives together with the result, and redis-py swallows one that arrives while it
    checks for stale data.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError
