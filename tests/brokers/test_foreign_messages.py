"""A foreign message becomes a dead letter that contains all of its bytes."""

import asyncio
import json
from uuid import uuid4

from confluent_kafka import Producer
from pika import BasicProperties
from redis import Redis

from inbox.sources.kafka import KafkaSource
from inbox.sources.nats import NatsSource
from inbox.sources.postgres import PostgresSource
from inbox.sources.rabbitmq import RabbitMQSource
from inbox.sources.redis import RedisSource
from inbox.sources.sqs import SqsSource
from outbox.brokers.sqs.connection import SqsSettings
from outbox.cloudevents.raw_text import bytes_of
from tests.fixtures.foreign_messages import DEEP, OTHER_RAW, RAW, given_up, raw_headers
from tests.fixtures.kafka import client_config
from tests.fixtures.nats import put_bytes
from tests.fixtures.rabbitmq import channel_of, exchange_of
from tests.fixtures.sessions import execute
from tests.fixtures.sqs import Aws, fresh
from tests.servers.kafka import KafkaCluster
from tests.servers.nats import NatsServer
from tests.servers.sqs import SqsServer


async def test_a_foreign_redis_entry_without_a_payload_is_dead_lettered(
    database_url: str, redis_url: str
) -> None:
    source = RedisSource(redis_url, consumer="billing", topics=["orders"])

    async def put() -> None:
        with Redis.from_url(redis_url, protocol=2) as client:
            for raw in (RAW, OTHER_RAW):
                client.xadd("orders", {b"data": raw, b"\xfd": b"text"})

    kept = await given_up(database_url, source, put)
    found = [
        {bytes_of(name): bytes_of(value) for name, value in fields.items()}
        for fields in (json.loads(letter.payload) for letter in kept)
    ]
    assert len(found) == 2
    assert {fields[b"data"] for fields in found} == {RAW, OTHER_RAW}
    assert {fields[b"\xfd"] for fields in found} == {b"text"}


async def test_a_foreign_redis_entry_with_a_payload_is_dead_lettered(
    database_url: str, redis_url: str
) -> None:
    source = RedisSource(redis_url, consumer="billing", topics=["orders"])

    async def put() -> None:
        with Redis.from_url(redis_url, protocol=2) as client:
            for raw in (RAW, OTHER_RAW):
                client.xadd("orders", {"payload": RAW, "raw": raw})

    kept = await given_up(database_url, source, put)
    assert [letter.payload for letter in kept] == [RAW, RAW]
    assert raw_headers(kept) == {RAW, OTHER_RAW}


async def test_a_foreign_kafka_record_is_dead_lettered(
    database_url: str, mock_kafka: KafkaCluster
) -> None:
    topic = f"orders.{uuid4().hex}"
    source = KafkaSource(mock_kafka.url, consumer=topic, topics=[topic])

    async def put() -> None:
        producer = Producer(client_config(mock_kafka.url))
        for raw in (RAW, OTHER_RAW):
            producer.produce(topic, RAW, raw, headers=[("raw", raw)])
        assert await asyncio.to_thread(producer.flush, 60) == 0

    kept = await given_up(database_url, source, put)
    assert [letter.payload for letter in kept] == [RAW, RAW]
    assert raw_headers(kept) == {RAW, OTHER_RAW}
    assert {bytes_of(letter.key or "") for letter in kept} == {RAW, OTHER_RAW}


async def test_a_foreign_nats_message_is_dead_lettered(
    database_url: str, shared_nats: NatsServer, nats_topics: str
) -> None:
    topic = f"{nats_topics}.orders"
    source = NatsSource(shared_nats.url, consumer="billing", topics=[topic])

    async def put() -> None:
        for raw in (RAW, OTHER_RAW):
            await put_bytes(shared_nats.url, topic.encode(), RAW, {b"raw": raw})

    kept = await given_up(database_url, source, put)
    assert [letter.payload for letter in kept] == [RAW, RAW]
    assert raw_headers(kept) == {RAW, OTHER_RAW}


async def test_a_foreign_rabbitmq_message_is_dead_lettered(
    database_url: str, rabbitmq_url: str
) -> None:
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
    assert [letter.payload for letter in kept] == [RAW, RAW]
    assert raw_headers(kept) == {RAW, OTHER_RAW}


async def test_a_foreign_sqs_message_is_dead_lettered(
    database_url: str, shared_sqs: SqsServer, aws: Aws
) -> None:
    topic = fresh()
    await aws.create_queue(topic)
    source = SqsSource(
        SqsSettings.from_url(shared_sqs.url()), consumer="billing", topics=[topic]
    )

    async def put() -> None:
        for raw in (RAW, OTHER_RAW):
            attribute = {"DataType": "Binary", "BinaryValue": raw}
            await aws.put_foreign(topic, RAW, raw=attribute)

    kept = await given_up(database_url, source, put)
    assert [letter.payload for letter in kept] == [RAW, RAW]
    assert raw_headers(kept) == {RAW, OTHER_RAW}


async def test_a_delivery_inserted_by_hand_is_dead_lettered(database_url: str) -> None:
    source = PostgresSource(database_url, consumer="billing", topics=["orders"])
    headers = [[1, "ä"], {"nested": {"n": None}}]
    texts = [*map(json.dumps, headers), DEEP]

    async def put() -> None:
        for n, foreign in enumerate(texts):
            await asyncio.to_thread(
                execute,
                database_url,
                "INSERT INTO inbox.delivery (message_id, lane, schema_version,"
                " consumer, topic, content_type, headers, payload) VALUES"
                " (gen_random_uuid(), 0, 1, 'billing', 'orders', 'x/y', %s, %s)",
                [foreign, RAW + b"%d" % n],
            )

    *kept, last = await given_up(database_url, source, put, count=3)
    assert [letter.payload for letter in kept] == [RAW + b"0", RAW + b"1"]
    assert [json.loads(letter.headers["headers"]) for letter in kept] == headers
    assert last.headers == {"headers": DEEP}
