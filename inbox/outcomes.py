"""Outcomes on their way to the broker: gathered, and written in batches.

An ack of its own for each message is a round trip for each. While one batch is being
written the next one gathers, so batches grow with the load by themselves.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Final, Generic, TypeVar

from outbox.errors import BrokerUnavailableError
from outbox.retry import RetryPolicy

T = TypeVar("T")

_GATHER: Final = 0.002
_RECONNECT: Final = RetryPolicy(
    first_delay=timedelta(milliseconds=100), max_delay=timedelta(seconds=5)
)


class Outcomes(Generic[T]):
    """Writes what is added, in that order. For one event loop.

    Args:
        write: writes a batch; called again with the same if it raises
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

    def add(self, outcome: T) -> None:
        """Have an outcome written soon."""
        self._waiting.append(outcome)
        self._added.set()

    def close(self) -> None:
        """Let `run` return when nothing is left to write."""
        self._closing.set()
        self._added.set()

    async def run(self) -> None:
        """Write what is added, until closed and empty, or cancelled."""
        failures = 0
        while True:
            await self._added.wait()
            if not self._waiting and self._closing.is_set():
                return
            if len(self._waiting) < self._max_batch and not self._closing.is_set():
                await asyncio.sleep(_GATHER)
            self._added.clear()
            batch = self._waiting[: self._max_batch]
            try:
                if batch:
                    await self._write(batch)
            except BrokerUnavailableError:
                failures += 1
                await asyncio.sleep(_RECONNECT.delay(failures).total_seconds())
            else:
                failures = 0
                del self._waiting[: len(batch)]
            if self._waiting or self._closing.is_set():
                self._added.set()
