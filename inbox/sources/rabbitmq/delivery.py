"""One delivery on one channel of RabbitMQ."""

from datetime import timedelta
from typing import Protocol, Self

from inbox.poison.history import FIRST_DELIVERY, REDELIVERED
from inbox.sources.rabbitmq.queue import Queue
from outbox.message import Message


class Settler(Protocol):
    """Who is told what became of deliveries."""

    def acked(self, delivery: "RabbitMQDelivery") -> None:
        """Have a delivery acked."""

    def nacked(self, delivery: "RabbitMQDelivery", delay: timedelta | None) -> None:
        """Put a delivery at its place again, or aside for a while."""


class RabbitMQDelivery:
    """One delivery on one channel."""

    def __init__(
        self,
        settler: Settler,
        queue: Queue,
        place: int,
        message: Message,
        problem: str | None,
        *,
        redelivered: bool,
    ) -> None:
        self.message = message
        self.attempts = 0
        self.problem = problem
        self.history = REDELIVERED if redelivered else FIRST_DELIVERY
        self.place = place
        self.queue = queue
        self._settler = settler
        self._settled = True

    @property
    def key(self) -> str | None:
        """The message's key."""
        return self.message.key

    def hand_over(self) -> Self:
        """Let it be settled, once."""
        self._settled = False
        return self

    async def ack(self) -> None:
        """Have it acked within milliseconds, unless its connection was lost since."""
        if not self._settled:
            self._settled = True
            self._settler.acked(self)

    async def nack(self, delay: timedelta | None = None) -> None:
        """Hand it over again here, or, if this source is left before, elsewhere."""
        if not self._settled:
            self._settled = True
            self._settler.nacked(self, delay)
