"""Dramatiq: an actor's message that is sent if and only if the transaction commits.

`send(session, bill.message(1))` instead of `bill.send(1)`. A relay in this process
hands the committed messages to Dramatiq's broker:

python -m examples.frameworks.dramatiq_actors
"""

import asyncio
import os
from collections.abc import Sequence
from typing import Any, Self

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker
from sqlalchemy.orm import Session

from pillarbox import (
    Acked,
    BrokerUnavailableError,
    Message,
    Nacked,
    Relay,
    add,
)

broker = RedisBroker(url=os.environ["PILLARBOX_BROKER_URL"])  # type: ignore[no-untyped-call]
dramatiq.set_broker(broker)


@dramatiq.actor
def bill(order_id: int) -> None:
    """Bill an order."""
    print(f"billed {order_id}", flush=True)


def send(session: Session, task: dramatiq.Message[Any]) -> None:
    """Send an actor's message with the session's transaction."""
    add(session, Message(f"dramatiq.{task.actor_name}", task.asdict()))


class DramatiqPublisher:
    """Publishes messages of the topics `dramatiq.*` to Dramatiq's actors."""

    identity = "dramatiq"

    def __init__(self, broker: dramatiq.Broker) -> None:
        self._broker = broker

    async def __aenter__(self) -> Self:
        """Return the publisher; Dramatiq connects when it sends."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close Dramatiq's connections."""
        self._broker.close()

    async def publish(self, batch: Sequence[Message]) -> Sequence[Acked | Nacked]:
        """Send each message with the id that it has in the outbox."""
        return [await asyncio.to_thread(self._send, message) for message in batch]

    def _send(self, message: Message) -> Acked | Nacked:
        name = message.topic.removeprefix("dramatiq.")
        if name not in self._broker.actors:
            return Nacked(f"there is no actor {name!r}", permanent=True)
        # Sent again after a crash, it has the same id.
        task = dramatiq.Message[Any](**message.json()).copy(message_id=str(message.id))
        try:
            self._broker.enqueue(task)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise BrokerUnavailableError(f"Dramatiq's broker: {error}") from error
        return Acked()


if __name__ == "__main__":
    publisher = DramatiqPublisher(broker)
    asyncio.run(Relay(os.environ["PILLARBOX_DATABASE_URL"], publisher).run())
