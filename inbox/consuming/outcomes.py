"""Write outcomes to the broker in batches.

Writing acks one at a time would cost a round trip for each message. While one batch is
being written, the next one collects, so batches grow with the load.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.outbox.gather import end
from pillarbox.outbox.retry import RECONNECT

T = TypeVar("T")

# The first or second attempt replaces a broken connection.
_FEW_FAILURES: Final = 3
_MANY_BATCHES: Final = 10


class Outcomes(Generic[T]):
    """Writes outcomes in the order in which they are added. For one event loop.

    Args:
        write: writes a batch; called again with the same batch if it raises
            `BrokerUnavailableError`.
    """

    def __init__(
        self, write: Callable[[Sequence[T]], Awaitable[None]], *, max_batch: int = 500
    ) -> None:
        self._write = write
        self._max_batch = max_batch
        self._waiting: list[T] = []
        self._added = asyncio.Event()
        self._closing = asyncio.Event()
        self._failures = 0
        self._failure: BrokerUnavailableError | None = None
        self._hurry = asyncio.Event()
        self._tried = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, outcome: T) -> None:
        """Schedule an outcome to be written."""
        self._waiting.append(outcome)
        self._added.set()

    def start(self, *others: Coroutine[Any, Any, None]) -> None:
        """Write outcomes in a task, next to the source's own."""
        self._tasks = [asyncio.create_task(each) for each in (self.run(), *others)]

    async def finish(self, seconds: float) -> None:
        """Write the outcomes that are left, within a time; then end all tasks."""
        self.close()
        try:
            await asyncio.wait(self._tasks[:1], timeout=seconds)
        finally:
            await end(self._tasks)

    def close(self) -> None:
        """Let `run` return once all outcomes are written."""
        self._closing.set()
        self._added.set()

    async def check(self) -> None:
        """Check that outcomes can be written, before more messages are fetched.

        After a few failures in a row, this triggers another attempt and waits for it.
        So outcomes that can't be written are reported and don't pile up.

        Raises:
            BrokerUnavailableError: that attempt also failed.
            Exception: what ended a task that `start` has begun.
        """
        for task in self._tasks:
            if task.done():
                task.result()
        many = len(self._waiting) >= _MANY_BATCHES * self._max_batch
        if self._failures >= _FEW_FAILURES or (self._failures and many):
            self._hurry.set()
            await self._tried.wait()
            if self._failure is not None:
                raise BrokerUnavailableError(
                    f"can't record outcomes: {self._failure}"
                ) from self._failure

    async def run(self) -> None:
        """Write outcomes until cancelled, or until closed and all are written."""
        try:
            await self._run()
        finally:
            self._tried.set()

    async def _run(self) -> None:
        while True:
            await self._added.wait()
            if not self._waiting and self._closing.is_set():
                return
            self._added.clear()
            batch = self._waiting[: self._max_batch]
            self._hurry.clear()
            try:
                if batch:
                    await self._write(batch)
            except BrokerUnavailableError as error:
                self._failures += 1
                self._record(error)
                await self._pause()
            else:
                self._failures = 0
                self._record(None)
                del self._waiting[: len(batch)]
            if self._waiting or self._closing.is_set():
                self._added.set()

    def _record(self, failure: BrokerUnavailableError | None) -> None:
        self._failure = failure
        self._tried.set()
        self._tried = asyncio.Event()

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(RECONNECT.delay(self._failures).total_seconds()):
                await self._hurry.wait()
