"""A foreign message becomes a dead letter that contains all of its bytes."""

import asyncio
import json
from uuid import uuid4

from confluent_kafka import Producer
from redis import Redis

from inbox.sources.kafka import KafkaSource
from inbox.sources.postgres import PostgresSource
from inbox.sources.redis import RedisSource
from outbox.cloudevents.raw_text import bytes_of
from tests.fixtures.foreign_messages import DEEP, OTHER_RAW, RAW, given_up, raw_headers
from tests.fixtures.kafka import client_config
from tests.fixtures.sessions import execute
from tests.servers.kafka import KafkaCluster


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


async def test_a_delivery_inserted_by_hand_is_dead_lettered(database_url: str) -> None:
    source = PostgresSource(database_url, consumer="billing", topics=["orders"])
    headers = [[1, "ä"], {"nested": {"n": None}}]
    texts = [*map(json.dumps, headers), DEEP]

    async def put() -> None:
        for n, foreign in enumerate(texts):
            await asyncio.to_thread(
                execute,
                database_url,
                "INSERT INTO inbox.message (message_id, lane, schema_version,"
                " topic, content_type, headers, payload) VALUES"
                " (gen_random_uuid(), 0, 1, 'orders', 'x/y', %s, %s)",
                [foreign, RAW + b"%d" % n],
            )

    *kept, last = await given_up(database_url, source, put, count=3)
    assert [letter.payload for letter in kept] == [RAW + b"0", RAW + b"1"]
    assert [json.loads(letter.headers["headers"]) for letter in kept] == headers
    assert last.headers == {"headers": DEEP}
