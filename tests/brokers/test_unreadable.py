"""Foreign messages with bytes where the broker's client expects text."""

import json
import struct
from uuid import uuid4

import pytest

from inbox.sources.nats import NatsSource
from inbox.sources.rabbitmq import RabbitMQSource
from inbox.sources.sqs import SqsSource
from outbox.brokers.sqs.connection import SqsSettings
from outbox.cloudevents.raw_text import bytes_of
from tests.fixtures.foreign_messages import OTHER_RAW, RAW, given_up
from tests.fixtures.nats import put_block, put_bytes
from tests.fixtures.rabbitmq import RawProperties
from tests.fixtures.rabbitmq import put_bytes as put_routed
from tests.fixtures.sqs import Aws, fresh
from tests.servers.nats import NatsServer
from tests.servers.sqs import SqsServer


async def test_a_nats_subject_that_is_not_text_is_dead_lettered(
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
    assert [letter.payload for letter in kept] == [RAW, RAW]
    assert {bytes_of(letter.topic) for letter in kept} == set(subjects)


async def test_an_invalid_nats_status_is_dead_lettered(
    database_url: str, shared_nats: NatsServer, nats_topics: str
) -> None:
    topic = f"{nats_topics}.orders"
    source = NatsSource(shared_nats.url, consumer="billing", topics=[topic])
    blocks = [b"NATS/1.0 \xff\r\n\r\n", b"\xff"]

    async def put() -> None:
        for block in blocks:
            await put_block(shared_nats.url, topic.encode(), block, RAW)

    kept = await given_up(database_url, source, put)
    assert [letter.payload for letter in kept] == [RAW, RAW]
    assert {bytes_of(letter.headers[""]) for letter in kept} == set(blocks)


async def test_a_rabbitmq_routing_key_that_is_not_text_is_dead_lettered(
    database_url: str, rabbitmq_url: str
) -> None:
    source = RabbitMQSource(
        rabbitmq_url, consumer=f"billing-{uuid4().hex}", topics=["orders.*"]
    )
    routing_keys = [b"orders.\xff", b"orders.\0"]

    async def put() -> None:
        for routing_key in routing_keys:
            put_routed(rabbitmq_url, routing_key, RAW)

    kept = await given_up(database_url, source, put)
    assert [letter.payload for letter in kept] == [RAW, RAW]
    assert {bytes_of(letter.topic) for letter in kept} == set(routing_keys)


def nested(depth: int) -> bytes:
    """Return an AMQP table nested to this depth."""
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
async def test_rabbitmq_headers_that_the_client_cannot_read_are_dead_lettered(
    database_url: str, rabbitmq_url: str, table: bytes
) -> None:
    source = RabbitMQSource(
        rabbitmq_url, consumer=f"billing-{uuid4().hex}", topics=["orders"]
    )
    foreign = RawProperties(table)

    async def put() -> None:
        for payload in (RAW, OTHER_RAW):
            put_routed(rabbitmq_url, b"orders", payload, foreign)

    kept = await given_up(database_url, source, put)
    assert [letter.payload for letter in kept] == [OTHER_RAW, RAW]
    for letter in kept:
        assert bytes_of(letter.headers[""]) == foreign.bytes


async def test_foreign_sqs_bodies_are_dead_lettered(
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

    async def put() -> None:
        for body in bodies:
            await aws.put_text(topic, body)

    kept = await given_up(database_url, source, put, count=len(bodies))
    assert {letter.payload.decode() for letter in kept} == set(bodies)


async def test_foreign_sqs_attributes_are_dead_lettered(
    database_url: str, shared_sqs: SqsServer, aws: Aws
) -> None:
    topic = fresh()
    await aws.create_queue(topic)
    source = SqsSource(
        SqsSettings.from_url(shared_sqs.url()), consumer="billing", topics=[topic]
    )
    attributes = [
        {"headers": '{"a":' * 20_000},
        {"headers": json.dumps({"a": "\ud800"})},
        {"body-encoding": "base64"},
    ]

    async def put() -> None:
        for values in attributes:
            typed = {
                name: {"DataType": "String", "StringValue": value}
                for name, value in values.items()
            }
            await aws.put_text(topic, "ä", **typed)

    kept = await given_up(database_url, source, put, count=len(attributes))
    assert {letter.payload.decode() for letter in kept} == {"ä"}
    assert all(letter.headers in attributes for letter in kept)
    assert len({str(letter.headers) for letter in kept}) == len(attributes)
