"""Programs that read a broker without the inbox: the bare client, and FastStream.

The bare loops insert a receipt and a row for each message with an `AsyncSession`, then
ack it. FastStream's subscribers insert the row only. Both handle as many messages at
once as a consumer does, and keep no order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Annotated, Any, Final
from urllib.parse import urlsplit
from uuid import UUID

import aio_pika
import nats
from aiokafka import AIOKafkaConsumer  # type: ignore[import-untyped]
from faststream import AckPolicy, Context
from nats.js.api import ConsumerConfig
from redis.asyncio import Redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from benchmarks.consuming import CONNECTIONS, NAME
from benchmarks.handlers import RECEIPT
from benchmarks.workload import TOPIC
from pillarbox.outbox.cloudevents.fields import PAYLOAD
from pillarbox.outbox.message_id import moment_of

AT_ONCE: Final = 256
EFFECT: Final = text("INSERT INTO effect (payload) VALUES (:payload)")

Ack = Callable[[], Awaitable[object]]
Sessions = async_sessionmaker[AsyncSession]


async def bare(broker_url: str, sessions: Sessions) -> None:
    """Read with the broker's client; insert a receipt and a row; ack."""
    slots = asyncio.Semaphore(CONNECTIONS)

    async def insert(id: UUID, payload: bytes, ack: Ack) -> None:
        try:
            receipt = {"id": id, "at": moment_of(id), "consumer": NAME}
            async with sessions.begin() as session:
                await session.execute(RECEIPT, receipt)
                await session.execute(EFFECT, {"payload": payload})
            await ack()
        finally:
            slots.release()

    async with asyncio.TaskGroup() as group:
        async for entry in READERS[urlsplit(broker_url).scheme](broker_url):
            await slots.acquire()
            group.create_task(insert(*entry))


async def read_redis(url: str) -> AsyncIterator[tuple[UUID, bytes, Ack]]:
    async with Redis.from_url(url, protocol=2) as client:
        await client.xgroup_create(TOPIC, NAME, "0", mkstream=True)
        while True:
            found: Any = await client.xreadgroup(
                NAME, "bare", {TOPIC: ">"}, count=AT_ONCE, block=1_000
            )
            for _, entries in found:
                for at, fields in entries:
                    ack = partial(client.xack, TOPIC, NAME, at)
                    yield UUID(fields[b"ce_id"].decode()), fields[PAYLOAD], ack


async def read_nats(url: str) -> AsyncIterator[tuple[UUID, bytes, Ack]]:
    client = await nats.connect(url)
    reading = await client.jetstream().pull_subscribe(
        TOPIC, NAME, config=ConsumerConfig(max_ack_pending=4 * AT_ONCE)
    )
    while True:
        try:
            entries = await reading.fetch(AT_ONCE, timeout=1)
        except TimeoutError:
            continue
        for entry in entries:
            assert entry.headers is not None
            yield UUID(entry.headers["ce-id"]), entry.data, entry.ack


async def read_rabbitmq(url: str) -> AsyncIterator[tuple[UUID, bytes, Ack]]:
    connection = await aio_pika.connect(url)
    channel = await connection.channel()
    await channel.set_qos(AT_ONCE)
    queue = await channel.get_queue(NAME)
    async with queue.iterator() as entries:
        async for entry in entries:
            assert entry.message_id is not None
            yield UUID(entry.message_id), entry.body, entry.ack


async def read_kafka(url: str) -> AsyncIterator[tuple[UUID, bytes, Ack]]:
    async def committed() -> None:
        """Do nothing: the client commits once in five seconds."""

    async with AIOKafkaConsumer(
        TOPIC,
        bootstrap_servers=urlsplit(url).netloc,
        group_id=NAME,
        auto_offset_reset="earliest",
    ) as reading:
        while True:
            for records in (await reading.getmany(timeout_ms=1_000)).values():
                for record in records:
                    id = dict(record.headers)["ce_id"].decode()
                    yield UUID(id), record.value, committed


READERS: Final[Mapping[str, Callable[[str], AsyncIterator[Any]]]] = {
    "redis": read_redis,
    "nats": read_nats,
    "amqp": read_rabbitmq,
    "kafka": read_kafka,
}


async def faststream(broker_url: str, sessions: Sessions) -> None:
    """Subscribe with FastStream; insert a row. Messages are acked afterwards."""
    scheme = urlsplit(broker_url).scheme
    broker, subscriber = await SUBSCRIBERS[scheme](broker_url)

    @subscriber  # type: ignore[untyped-decorator]
    async def handle(body: Any, message: Annotated[Any, Context()]) -> None:
        payload = message.body
        if scheme == "redis":  # its body is all fields
            payload = message.raw_message["data"][PAYLOAD]
        async with sessions.begin() as session:
            await session.execute(EFFECT, {"payload": payload})

    await broker.start()
    await asyncio.Event().wait()


async def on_redis(url: str) -> tuple[Any, Any]:
    from faststream.redis import RedisBroker, StreamSub

    async with Redis.from_url(url) as client:
        await client.xgroup_create(TOPIC, NAME, "0", mkstream=True)
    broker = RedisBroker(url, logger=None)  # type: ignore[arg-type]
    stream = StreamSub(TOPIC, group=NAME, consumer="one", max_records=AT_ONCE)
    subscriber = broker.subscriber(
        stream=stream, ack_policy=AckPolicy.NACK_ON_ERROR, max_workers=CONNECTIONS
    )
    return broker, subscriber


async def on_nats(url: str) -> tuple[Any, Any]:
    from faststream.nats import JStream, NatsBroker, PullSub

    broker = NatsBroker(url, logger=None)
    subscriber = broker.subscriber(
        TOPIC,
        stream=JStream("orders", declare=False),
        durable=NAME,
        pull_sub=PullSub(batch_size=AT_ONCE),
        ack_policy=AckPolicy.NACK_ON_ERROR,
        max_workers=CONNECTIONS,
    )
    return broker, subscriber


async def on_rabbitmq(url: str) -> tuple[Any, Any]:
    from faststream.rabbit import Channel, RabbitBroker, RabbitQueue

    broker = RabbitBroker(url, logger=None)
    subscriber = broker.subscriber(
        RabbitQueue(NAME, durable=True, declare=False),
        channel=Channel(prefetch_count=CONNECTIONS),
        ack_policy=AckPolicy.NACK_ON_ERROR,
    )
    return broker, subscriber


async def on_kafka(url: str) -> tuple[Any, Any]:
    from faststream.kafka import KafkaBroker

    broker = KafkaBroker(urlsplit(url).netloc.split(","), logger=None)
    subscriber = broker.subscriber(
        TOPIC,
        group_id=NAME,
        auto_offset_reset="earliest",
        ack_policy=AckPolicy.NACK_ON_ERROR,
        max_workers=CONNECTIONS,
    )
    return broker, subscriber


SUBSCRIBERS: Final[Mapping[str, Callable[[str], Awaitable[tuple[Any, Any]]]]] = {
    "redis": on_redis,
    "nats": on_nats,
    "amqp": on_rabbitmq,
    "kafka": on_kafka,
}
