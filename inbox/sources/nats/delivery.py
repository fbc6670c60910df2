"""One message of a stream of NATS JetStream."""

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from inbox.poison.history import FIRST_DELIVERY, REDELIVERED
from inbox.sources.nats.durable import Entry
from outbox.message import Message


class Settler(Protocol):
    """Who is told what became of entries."""

    def acked(self, entry: Entry) -> None:
        """Have an entry acked."""

    def nacked(self, entry: Entry, delay: timedelta | None) -> None:
        """Put an entry back into its place, or aside for a while."""


class NatsDelivery:
    """One message of a stream."""

    def __init__(self, settler: Settler, entry: Entry) -> None:
        self.message: Message = entry.message
        self.attempts: int = entry.attempts
        self.problem: str | None = entry.problem
        self.history = FIRST_DELIVERY if entry.is_first else REDELIVERED
        self._entry = entry
        self._settler = settler
        self._settled = False

    async def ack(self) -> None:
        """Have it acked within milliseconds."""
        self._settle(lambda: self._settler.acked(self._entry))

    async def nack(self, delay: timedelta | None = None) -> None:
        """Hand it over again here, or, if this source is left before, elsewhere."""
        self._settle(lambda: self._settler.nacked(self._entry, delay))

    def _settle(self, how: Callable[[], None]) -> None:
        if not self._settled:
            self._settled = True
            how()
