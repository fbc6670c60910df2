"""A source that reads a list in this process, for tests."""

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Final, Self

from inbox.source import Abilities, Delivery
from outbox.brokers.memory import MemoryOptions
from outbox.errors import ConfigError
from outbox.message import Message
from outbox.url import without_password

_POLL: Final = timedelta(seconds=1)


class MemoryDelivery:
    """One delivery of a message that waits in this process."""

    def __init__(self, source: "MemorySource", message: Message, attempts: int) -> None:
        self.message = message
        self.attempts = attempts
        self.problem: str | None = None
        self.history = self.published_at = None
        self._source = source

    async def ack(self) -> None:
        """Move the message to `acked`."""
        if self._source.held.pop(id(self), None) is not None:
            self._source.acked.append(self.message)

    async def nack(self, delay: timedelta | None = None) -> None:
        """Deliver it again: before all others, or after the delay."""
        if self._source.held.pop(id(self), None) is None:
            return
        if delay is None:
            self._source.return_now(self.message, self.attempts)
        else:
            self._source.return_later(self.message, self.attempts + 1, delay)

    async def hand_back(self, delay: timedelta) -> bool:
        """Deliver it again after the delay."""
        if self._source.held.pop(id(self), None) is not None:
            self._source.return_later(self.message, self.attempts, delay)
        return True


class MemorySource:
    """A source of the messages that were added to it.

    Attributes:
        acked: the acked messages, in the order of their acks.
        held: the deliveries that were received but aren't settled.
    """

    def __init__(self, *messages: Message, poll_interval: timedelta = _POLL) -> None:
        self.abilities = Abilities()
        self.acked: list[Message] = []
        self.held: dict[int, MemoryDelivery] = {}
        self._poll = poll_interval.total_seconds()
        self._ready: deque[tuple[Message, int]] = deque((m, 0) for m in messages)
        self._waiting: list[tuple[float, int, Message, int]] = []
        self._ticket = count()
        self._arrived = asyncio.Event()

    @classmethod
    def from_url(cls, url: str, *, consumer: str, topics: Sequence[str]) -> Self:
        """Create an empty source from `memory://`.

        Raises:
            ConfigError: the URL is anything else.
        """
        url, _ = MemoryOptions.parse(url)
        if url.rstrip("/") != "memory:":
            raise ConfigError(f"broker URL {without_password(url)!r}: write memory://")
        return cls()

    @property
    def waiting(self) -> int:
        """The number of messages still to be delivered."""
        return len(self._ready) + len(self._waiting)

    def add(self, *messages: Message) -> None:
        """Add messages to the end of the queue."""
        self._ready.extend((message, 0) for message in messages)
        self._arrived.set()

    def return_now(self, message: Message, attempts: int) -> None:
        """Return a message to the front of the queue."""
        self._ready.appendleft((message, attempts))
        self._arrived.set()

    def return_later(self, message: Message, attempts: int, delay: timedelta) -> None:
        """Return a message to the queue after a delay."""
        due = time.monotonic() + delay.total_seconds()
        heapq.heappush(self._waiting, (due, next(self._ticket), message, attempts))
        self._arrived.set()

    async def __aenter__(self) -> Self:
        """Return the source; there is nothing to connect to."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Return all unsettled messages to the queue."""
        for delivery in reversed(list(self.held.values())):
            await delivery.nack()

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        """Return at most `limit` deliveries that are ready."""
        deadline = time.monotonic() + self._poll
        while True:
            now = time.monotonic()
            while self._waiting and self._waiting[0][0] <= now:
                _, _, message, attempts = heapq.heappop(self._waiting)
                self._ready.append((message, attempts))
            if self._ready or now >= deadline:
                break
            wake = min(deadline, self._waiting[0][0] if self._waiting else deadline)
            self._arrived.clear()
            try:
                async with asyncio.timeout(wake - now):
                    await self._arrived.wait()
            except TimeoutError:
                continue
        given = [
            MemoryDelivery(self, *self._ready.popleft())
            for _ in range(min(limit, len(self._ready)))
        ]
        self.held.update((id(delivery), delivery) for delivery in given)
        return given
