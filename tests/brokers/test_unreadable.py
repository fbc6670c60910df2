"""Foreign messages with bytes where the broker's client expects text."""

import json
import struct
from uuid import uuid4

import pytest

from pillarbox.inbox.sources.nats import NatsSource
from pillarbox.inbox.sources.rabbitmq import RabbitMQSource
from pillarbox.inbox.sources.sqs import SqsSource
from pillarbox.outbox.brokers.sqs.connection import SqsSettings
from pillarbox.outbox.cloudevents.raw_text import bytes_of
from tests.fixtures.foreign_messages import OTHER_RAW, RAW, given_up
from tests.fixtures.nats import put_block, put_bytes
from tests.fixtures.rabbitmq import RawProperties
from tests.fixtures.rabbitmq import put_bytes as put_routed
from tests.fixtures.sqs import Aws, fresh
from tests.servers.nats import NatsServer
from tests.servers.sqs import SqsServer


async def test_nats_messages_that_are_not_text_are_dead_lettered(
    database_url: str, shared_nats: NatsServer, nats_topics: str
) -> None:
    source = NatsSource(
        shared_nats.url, consumer="billing", topics=[f"{nats_topics}.*"]
    )
    orders = f"{nats_topics}.orders".encode()
    subjects = [f"{nats_topics}.".encode() + end for end in (b"\xff", b"\xfe")]
    blocks = [b"\xfe", b"\xff"]

    async def put() -> None:
        for subject in subjects:
            await put_bytes(shared_nats.url, subject, RAW, {})
        for block in blocks:
            await put_block(shared_nats.url, orders, block, OTHER_RAW)

    kept = await given_up(database_url, source, put, count=4)
    by_subject = [letter for letter in kept if letter.payload == RAW]
    assert {bytes_of(letter.topic) for letter in by_subject} == set(subjects)
    by_block = [letter for letter in kept if letter.payload == OTHER_RAW]
    assert {bytes_of(letter.headers[""]) for letter in by_block} == set(blocks)
    assert {bytes_of(letter.topic) for letter in by_block} == {orders}


def nested(depth: int) -> bytes:
    """Return an AMQP table nested to this depth."""
    table = b""
    for _ in range(depth):
        table = b"\x01aF" + struct.pack(">I", len(table)) + table
    return table


@pytest.mark.parametrize("shards", [1, 3])
async def test_rabbitmq_messages_that_the_client_cannot_read_are_dead_lettered(
    database_url: str, rabbitmq_url: str, shards: int
) -> None:
    url = f"{rabbitmq_url}&shards={shards}"
    source = RabbitMQSource(url, consumer=f"billing-{uuid4().hex}", topics=["orders.*"])
    routing_keys = [b"orders.\xff", b"orders.\0"]
    too_deep = nested(10_000)
    time_in_ms = b"\x01tT" + struct.pack(">Q", 1_700_000_000_000)
    foreign = [RawProperties(table) for table in (too_deep, time_in_ms)]

    async def put() -> None:
        for routing_key in routing_keys:
            put_routed(rabbitmq_url, routing_key, RAW)
        for properties in foreign:
            put_routed(rabbitmq_url, b"orders.x", OTHER_RAW, properties)

    kept = await given_up(database_url, source, put, count=4)
    by_key = [letter for letter in kept if letter.payload == RAW]
    assert {bytes_of(letter.topic) for letter in by_key} == set(routing_keys)
    by_table = [letter for letter in kept if letter.payload == OTHER_RAW]
    assert {bytes_of(letter.headers[""]) for letter in by_table} == {
        properties.bytes for properties in foreign
    }


async def test_foreign_sqs_messages_are_dead_lettered(
    database_url: str, shared_sqs: SqsServer, aws: Aws
) -> None:
    topic = fresh()
    await aws.create_queue(topic)
    source = SqsSource(
        SqsSettings.from_url(shared_sqs.url()), consumer="billing", topics=[topic]
    )
    envelope = {
        "Type": "Notification",
        "TopicArn": "arn",
        "Message": "\ud800",
        "MessageAttributes": {},
    }
    bodies = [
        "plain",
        '{"order": 1}',
        '{"a":' * 20_000,
        # A lone surrogate, which UTF-8 can't encode.
        json.dumps(envelope),
    ]
    attributes = [
        {"headers": '{"a":' * 20_000},
        {"headers": json.dumps({"a": "\ud800"})},
        {"body-encoding": "base64"},
    ]

    async def put() -> None:
        for body in bodies:
            await aws.put_text(topic, body)
        for values in attributes:
            typed = {
                name: {"DataType": "String", "StringValue": value}
                for name, value in values.items()
            }
            await aws.put_text(topic, "ä", **typed)

    count = len(bodies) + len(attributes)
    kept = await given_up(database_url, source, put, count=count)
    by_attributes = [letter for letter in kept if letter.payload.decode() == "ä"]
    by_body = [letter for letter in kept if letter not in by_attributes]
    assert {letter.payload.decode() for letter in by_body} == set(bodies)
    assert all(letter.headers in attributes for letter in by_attributes)
    assert len({str(letter.headers) for letter in by_attributes}) == len(attributes)
