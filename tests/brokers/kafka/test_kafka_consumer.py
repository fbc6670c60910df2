"""From the outbox through Kafka to a consumer with two replicas, each message once."""

import asyncio
from uuid import uuid4

from sqlalchemy.ext.asyncio import AsyncSession

from inbox.sources.kafka import KafkaSource
from pillarbox import Consumer, Message
from relay.publishers.kafka import KafkaPublisher
from tests.fixtures.consumers import async_sessions_of, running
from tests.fixtures.kafka import Kafka
from tests.fixtures.relay import insert
from tests.fixtures.relay import running as relay_running

COUNT = 54


async def test_replicas_handle_each_message_once_and_keys_in_order(
    database_url: str, shared_kafka: Kafka
) -> None:
    topic = f"orders.{uuid4().hex}"
    handled: list[Message] = []
    all_handled = asyncio.Event()
    await asyncio.to_thread(
        insert,
        database_url,
        *(Message(topic, b"%d" % n, key=f"key {n % 9}") for n in range(COUNT)),
    )

    async with async_sessions_of(database_url) as sessions:

        def replica() -> Consumer:
            source = KafkaSource(
                f"{shared_kafka.url}/?session.timeout.ms=2000&heartbeat.interval.ms=100",
                consumer=topic,
                topics=[topic],
            )
            consumer = Consumer(source, sessions, name="billing")

            @consumer.handles(topic)
            async def handle(session: AsyncSession, message: Message) -> None:
                handled.append(message)
                if len(handled) >= COUNT:
                    all_handled.set()

            return consumer

        async with (
            relay_running(database_url, KafkaPublisher(shared_kafka.url)),
            running(replica()),
            running(replica()),
            asyncio.timeout(90),
        ):
            await all_handled.wait()

    assert len(handled) == COUNT
    for key in {message.key for message in handled}:
        numbers = [int(m.payload) for m in handled if m.key == key]
        assert numbers == sorted(numbers)
