"""Drain an outbox with pillarbox's relay and aio-pika's publish in a gather.

The exchange, the properties and the wait for confirms are those of pillarbox's own
publisher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self

import aio_pika  # in its own environment

from benchmarks.drain import main
from pillarbox.outbox.brokers.rabbitmq.message import to_properties
from pillarbox.outbox.brokers.rabbitmq.options import RabbitMQOptions
from pillarbox.outbox.message import Message
from pillarbox.relay.publisher import Acked, Confirmation

ACKED = Acked()


class AioPikaPublisher:
    """Publishes persistent messages; a refused message raises an error."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Any = None
        self._exchange: Any = None

    async def __aenter__(self) -> Self:
        self._connection = await aio_pika.connect(self._url)
        channel = await self._connection.channel(publisher_confirms=True)
        self._exchange = await channel.get_exchange(RabbitMQOptions.exchange)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._connection.close()

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        await asyncio.gather(*(self._publish(message) for message in batch))
        return [ACKED] * len(batch)

    async def _publish(self, message: Message) -> None:
        properties = to_properties(message)
        await self._exchange.publish(
            aio_pika.Message(
                message.payload,
                headers=properties.headers,
                content_type=properties.content_type,
                message_id=properties.message_id,
                delivery_mode=properties.delivery_mode,
            ),
            routing_key=message.topic,
            mandatory=True,
        )


if __name__ == "__main__":
    main(AioPikaPublisher)
