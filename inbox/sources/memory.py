"""A source that reads a list in this process, for tests."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from typing import Final, Self

from pillarbox.inbox.consuming.backlog import Backlog
from pillarbox.inbox.poison.history import History
from pillarbox.inbox.source import Abilities, Arrived, Delivery
from pillarbox.outbox.brokers.memory import MemoryOptions
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.message import Message
from pillarbox.outbox.url import without_password

_POLL: Final = timedelta(seconds=1)


@dataclass(eq=False, kw_only=True)
class MemoryDelivery(Arrived):
    """One delivery of a message that waits in this process."""

    source: "MemorySource"
    history: History | None = None

    async def ack(self) -> None:
        """Move the message to `acked`."""
        if self.source.held.pop(id(self), None) is not None:
            self.source.acked.append(self.message)

    async def nack(self, delay: timedelta | None = None) -> None:
        """Deliver it again: before all others, or after the delay."""
        self.source.put_back(self, self.attempts + (delay is not None), delay)

    async def hand_back(self, delay: timedelta) -> bool:
        """Deliver it again after the delay."""
        self.source.put_back(self, self.attempts, delay)
        return True


class MemorySource:
    """A source of the messages that were added to it.

    Attributes:
        acked: the acked messages, in the order of their acks.
        held: the deliveries that were received but aren't settled.
    """

    def __init__(self, *messages: Message, poll_interval: timedelta = _POLL) -> None:
        self.acked: list[Message] = []
        self.held: dict[int, MemoryDelivery] = {}
        self._poll = poll_interval.total_seconds()
        self._backlog: Backlog[MemoryDelivery] = Backlog()
        self.abilities = Abilities(
            leave_out=self._backlog.leave_out, pauses=self._backlog.leave_out_paused
        )
        self._place = count()
        self._arrived = asyncio.Event()
        self.add(*messages)

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
        return len(self._backlog)

    def add(self, *messages: Message, attempts: int = 0) -> None:
        """Add messages, which may have failed before, to the end of the queue."""
        for message in messages:
            self._backlog.add(
                MemoryDelivery(
                    source=self,
                    message=message,
                    attempts=attempts,
                    place=next(self._place),
                )
            )
        self._arrived.set()

    def put_back(
        self, delivery: MemoryDelivery, attempts: int, delay: timedelta | None
    ) -> None:
        """Return a delivery to its place in the queue, or after a delay to the end."""
        if self.held.pop(id(delivery), None) is None:
            return
        place = delivery.place if delay is None else next(self._place)
        again = replace(delivery, attempts=attempts, place=place)
        if delay is None:
            self._backlog.add(again)
        else:
            self._backlog.defer(again, delay.total_seconds())
        self._arrived.set()

    async def __aenter__(self) -> Self:
        """Return the source; there is nothing to connect to."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Return all unsettled messages to the queue."""
        for delivery in list(self.held.values()):
            await delivery.nack()

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        """Return at most `limit` deliveries that are ready."""
        deadline = time.monotonic() + self._backlog.patience(self._poll)
        while not self._backlog.ready and (left := deadline - time.monotonic()) > 0:
            self._arrived.clear()
            await self._backlog.wait_for(self._arrived, left)
        given = self._backlog.take(limit)
        self.held.update((id(delivery), delivery) for delivery in given)
        return given
