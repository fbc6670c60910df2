"""What strangers put into a broker: a dead letter that has every byte of it."""

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from pika import BasicProperties
from redis import Redis

from inbox import Consumer
from inbox.events import MessageDeadLettered
from inbox.source import Source
from inbox.sources.kafka import KafkaSource
from inbox.sources.nats import NatsSource
from inbox.sources.postgres import PostgresSource
from inbox.sources.rabbitmq import RabbitMQSource
from inbox.sources.redis import RedisSource
from inbox.sources.sqs import SqsSource
from outbox.sqs import SqsSettings
from outbox.stranger import bytes_of
from outbox.testing.kafka import KafkaCluster
from outbox.testing.nats import NatsServer
from outbox.testing.sqs import SqsServer
from tests.fixtures.consumers import async_sessions_of, running
from tests.fixtures.kafka import client_config
from tests.fixtures.nats import put_block, put_bytes
from tests.fixtures.rabbitmq import RawProperties, channel_of, exchange_of
from tests.fixtures.rabbitmq import put_bytes as put_routed
from tests.fixtures.relay import execute
from tests.fixtures.sqs import Aws, fresh

RAW = b"\xff\x00 not text"
OTHER_RAW = b"\xfe\x00 not text"


class Kept(NamedTuple):
    """What a dead letter has of a stranger."""

    topic: str
    payload: bytes
    key: str | None
    headers: dict[str, str]


async def given_up(
    database_url: str, source: Source, put: Callable[[], Awaitable[None]]
) -> list[Kept]:
    """Let a consumer meet two strangers; give their dead letters."""
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(source, sessions, name="billing")

        @consumer.handles("*")
        async def handle(session: Any, message: Any) -> None:
            raise AssertionError("what is no message was handled")

        async with running(consumer) as events:
            await put()
            await events.wait_for(MessageDeadLettered, 2)
    rows = await asyncio.to_thread(
        execute,
        database_url,
        "SELECT topic, payload, key, headers FROM inbox.dead_letter"
        " ORDER BY payload, headers",
    )
    return [
        Kept(topic, bytes(payload), key, headers)
        for topic, payload, key, headers in rows
    ]


def raw_headers(kept: list[Kept]) -> set[bytes]:
    """Give the header `raw` of each as bytes."""
    return {bytes_of(stranger.headers["raw"]) for stranger in kept}


async def test_redis_without_a_payload(database_url: str, redis_url: str) -> None:
    source = RedisSource(redis_url, consumer="billing", topics=["orders"])

    async def put() -> None:
        with Redis.from_url(redis_url, protocol=2) as client:
            for raw in (RAW, OTHER_RAW):
                client.xadd("orders", {b"data": raw, b"\xfd": b"text"})

    kept = await given_up(database_url, source, put)
    found = [
        {bytes_of(name): bytes_of(value) for name, value in fields.items()}
        for fields in (json.loads(stranger.payload) for stranger in kept)
    ]
    assert len(found) == 2
    assert {fields[b"data"] for fields in found} == {RAW, OTHER_RAW}
    assert {fields[b"\xfd"] for fields in found} == {b"text"}


async def test_redis_with_a_payload(database_url: str, redis_url: str) -> None:
    source = RedisSource(redis_url, consumer="billing", topics=["orders"])

    async def put() -> None:
        with Redis.from_url(redis_url, protocol=2) as client:
            for raw in (RAW, OTHER_RAW):
                client.xadd("orders", {"payload": RAW, "raw": raw})

    kept = await given_up(database_url, source, put)
    assert [stranger.payload for stranger in kept] == [RAW, RAW]
    assert raw_headers(kept) == {RAW, OTHER_RAW}


async def test_kafka(database_url: str, shared_kafka: KafkaCluster) -> None:
    topic = f"orders.{uuid4().hex}"
    source = KafkaSource(shared_kafka.url, consumer=topic, topics=[topic])

    async def put() -> None:
        producer = Producer(client_config(shared_kafka.url))
        for raw in (RAW, OTHER_RAW):
            producer.produce(topic, RAW, raw, headers=[("raw", raw)])
        assert await asyncio.to_thread(producer.flush, 60) == 0

    kept = await given_up(database_url, source, put)
    assert [stranger.payload for stranger in kept] == [RAW, RAW]
    assert raw_headers(kept) == {RAW, OTHER_RAW}
    assert {bytes_of(stranger.key or "") for stranger in kept} == {RAW, OTHER_RAW}


async def test_nats(
    database_url: str, shared_nats: NatsServer, nats_topics: str
) -> None:
    topic = f"{nats_topics}.orders"
    source = NatsSource(shared_nats.url, consumer="billing", topics=[topic])

    async def put() -> None:
        for raw in (RAW, OTHER_RAW):
            await put_bytes(shared_nats.url, topic.encode(), RAW, {b"raw": raw})

    kept = await given_up(database_url, source, put)
    assert [stranger.payload for stranger in kept] == [RAW, RAW]
    assert raw_headers(kept) == {RAW, OTHER_RAW}


async def test_nats_with_a_subject_that_is_no_text(
    database_url: str, shared_nats: NatsServer, nats_topics: str
) -> None:
    source = NatsSource(
        shared_nats.url, consumer="billing", topics=[f"{nats_topics}.*"]
    )
    subjects = [f"{nats_topics}.".encode() + end for end in (b"\xff", b"\xfe")]

    async def put() -> None:
        for subject in subjects:
            await put_bytes(shared_nats.url, subject, RAW, {})

    kept = await given_up(database_url, source, put)
    assert [stranger.payload for stranger in kept] == [RAW, RAW]
    assert {bytes_of(stranger.topic) for stranger in kept} == set(subjects)


async def test_nats_with_a_status_that_is_none(
    database_url: str, shared_nats: NatsServer, nats_topics: str
) -> None:
    topic = f"{nats_topics}.orders"
    source = NatsSource(shared_nats.url, consumer="billing", topics=[topic])
    blocks = [b"NATS/1.0 \xff\r\n\r\n", b"\xff"]

    async def put() -> None:
        for block in blocks:
            await put_block(shared_nats.url, topic.encode(), block, RAW)

    kept = await given_up(database_url, source, put)
    assert [stranger.payload for stranger in kept] == [RAW, RAW]
    assert {bytes_of(stranger.headers[""]) for stranger in kept} == set(blocks)


async def test_rabbitmq(database_url: str, rabbitmq_url: str) -> None:
    source = RabbitMQSource(
        rabbitmq_url.partition("?")[0],
        consumer=f"billing-{uuid4().hex}",
        topics=["orders"],
        exchange=exchange_of(rabbitmq_url),
    )

    async def put() -> None:
        with channel_of(rabbitmq_url) as channel:
            for raw in (RAW, OTHER_RAW):
                channel.basic_publish(
                    exchange_of(rabbitmq_url),
                    "orders",
                    RAW,
                    BasicProperties(headers={"raw": raw}),  # type: ignore[no-untyped-call]
                )

    kept = await given_up(database_url, source, put)
    assert [stranger.payload for stranger in kept] == [RAW, RAW]
    assert raw_headers(kept) == {RAW, OTHER_RAW}


async def test_rabbitmq_with_a_routing_key_that_is_no_text(
    database_url: str, rabbitmq_url: str
) -> None:
    source = RabbitMQSource(
        rabbitmq_url.partition("?")[0],
        consumer=f"billing-{uuid4().hex}",
        topics=["orders.*"],
        exchange=exchange_of(rabbitmq_url),
    )
    routing_keys = [b"orders.\xff", b"orders.\0"]

    async def put() -> None:
        for routing_key in routing_keys:
            put_routed(rabbitmq_url, routing_key, RAW)

    kept = await given_up(database_url, source, put)
    assert [stranger.payload for stranger in kept] == [RAW, RAW]
    assert {bytes_of(stranger.topic) for stranger in kept} == set(routing_keys)


def nested(depth: int) -> bytes:
    """Give a table of AMQP with a table in it, and so on."""
    table = b""
    for _ in range(depth):
        table = b"\x01aF" + struct.pack(">I", len(table)) + table
    return table


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(nested(10_000), id="nested too deep"),
        pytest.param(b"\x01tT" + struct.pack(">Q", 1_700_000_000_000), id="time in ms"),
    ],
)
async def test_rabbitmq_with_headers_that_its_client_cannot_read(
    database_url: str, rabbitmq_url: str, table: bytes
) -> None:
    source = RabbitMQSource(
        rabbitmq_url.partition("?")[0],
        consumer=f"billing-{uuid4().hex}",
        topics=["orders"],
        exchange=exchange_of(rabbitmq_url),
    )
    strange = RawProperties(table)

    async def put() -> None:
        for payload in (RAW, OTHER_RAW):
            put_routed(rabbitmq_url, b"orders", payload, strange)

    kept = await given_up(database_url, source, put)
    assert [stranger.payload for stranger in kept] == [OTHER_RAW, RAW]
    for stranger in kept:
        assert bytes_of(stranger.headers[""]) == strange.bytes


async def test_sqs(database_url: str, shared_sqs: SqsServer, aws: Aws) -> None:
    topic = fresh()
    await aws.create_queue(topic)
    source = SqsSource(
        SqsSettings.from_url(shared_sqs.url()), consumer="billing", topics=[topic]
    )

    async def put() -> None:
        for raw in (RAW, OTHER_RAW):
            attribute = {"DataType": "Binary", "BinaryValue": raw}
            await aws.put_stranger(topic, RAW, raw=attribute)

    kept = await given_up(database_url, source, put)
    assert [stranger.payload for stranger in kept] == [RAW, RAW]
    assert raw_headers(kept) == {RAW, OTHER_RAW}


async def test_postgres(database_url: str) -> None:
    source = PostgresSource(database_url, consumer="billing", topics=["orders"])
    headers = [[1, "ä"], {"nested": {"n": None}}]

    async def put() -> None:
        for n, strange in enumerate(headers):
            await asyncio.to_thread(
                execute,
                database_url,
                "INSERT INTO inbox.delivery (message_id, lane, schema_version,"
                " consumer, topic, content_type, headers, payload) VALUES"
                " (gen_random_uuid(), 0, 1, 'billing', 'orders', 'x/y', %s, %s)",
                [json.dumps(strange), RAW + b"%d" % n],
            )

    kept = await given_up(database_url, source, put)
    assert [stranger.payload for stranger in kept] == [RAW + b"0", RAW + b"1"]
    assert [json.loads(stranger.headers["headers"]) for stranger in kept] == headers
