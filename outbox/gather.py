"""Run calls concurrently, all or nothing, and let them be cancelled at any time."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Self, TypeVar

from pillarbox.outbox.errors import OutboxError, one_line, traceback_of
from pillarbox.outbox.events import Observer, ProcessFailed
from pillarbox.outbox.observability.watchdog import reporting_blocks

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


async def start(
    run: Coroutine[Any, Any, None], started: asyncio.Event
) -> asyncio.Task[None]:
    """Run a process in a task of its own; return once it has started.

    Raises:
        Exception: what `run` raised before it had started.
    """
    task = asyncio.create_task(run)
    waiting = asyncio.create_task(started.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        await end([waiting])
    except asyncio.CancelledError:
        await end([task, waiting])
        raise
    if task.done():
        await task
    return task


class Process(ABC):
    """A process that `async with` runs in the background, as in FastAPI's lifespan.

    Entering returns once it has started, or raises what `run` does if it can't start.
    Leaving drains and stops it. If it ends before that, it reports `ProcessFailed`, and
    leaving raises the error.
    """

    def __init__(self) -> None:
        self._started = asyncio.Event()
        self._embedded: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has started, and has not ended."""
        return self._started.is_set()

    @abstractmethod
    async def run(self) -> None:
        """Run until `stop` or cancellation; set `_started` after the start."""

    @abstractmethod
    def stop(self) -> None:
        """Make `run` drain and return."""

    async def __aenter__(self) -> Self:
        """Run in the background until the block ends."""
        self._embedded = await start(self.run(), self._started)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Drain and stop."""
        self.stop()
        embedded, self._embedded = self._embedded, None
        if embedded is not None:
            await embedded

    async def _drained(
        self, work: Coroutine[Any, Any, None], name: str, notify: Observer
    ) -> None:
        """Run to the end; a cancellation stops it, a second one ends the drain."""
        task = asyncio.create_task(work)
        try:
            async with reporting_blocks():
                try:
                    await asyncio.shield(task)
                except asyncio.CancelledError:
                    self.stop()
                    if not self.is_running:  # there is nothing to drain
                        task.cancel()
                    await task
                    if asyncio.current_task() is self._embedded:
                        raise OutboxError("its task was cancelled") from None
                    raise
        except BaseException as error:
            is_asked = isinstance(error, asyncio.CancelledError)
            if self.is_running and not is_asked:  # otherwise the caller gets it
                self._started.clear()
                trace, reason = traceback_of(error), one_line(error)
                notify(ProcessFailed(process=name, reason=reason, stacktrace=trace))
            raise
        finally:
            self._started.clear()


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
