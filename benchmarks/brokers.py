"""The brokers to publish to.

Each run has its own server, prepared to store the published messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import nats
from pika import BlockingConnection, URLParameters

from benchmarks.http_sink import http_sink
from benchmarks.workload import TOPIC
from pillarbox.outbox.brokers.rabbitmq.options import RabbitMQOptions
from pillarbox.outbox.brokers.sqs.connection import SqsSettings
from tests.fixtures.real_kafka import real_kafka
from tests.servers.nats import nats_server
from tests.servers.rabbitmq import rabbitmq_server
from tests.servers.redis import redis_server
from tests.servers.sqs import sqs_server


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """A broker, and how many messages are published to it.

    Attributes:
        label: its name in the output.
        server: starts a new server, and yields its URL for publishers.
        messages: the number of messages in one run.
        few_messages: the number of messages in one quick run.
    """

    label: str
    server: Callable[[], AbstractContextManager[str]]
    messages: int = 50_000
    few_messages: int = 20_000


@contextmanager
def redis() -> Iterator[str]:
    with redis_server() as server:
        yield server.url


@contextmanager
def nats_jetstream() -> Iterator[str]:
    async def make_stream(url: str) -> None:
        async with await nats.connect(url) as client:
            subjects = [TOPIC, f"{TOPIC}.*"]  # with its shards
            await client.jetstream().add_stream(name="orders", subjects=subjects)

    with nats_server() as server:
        asyncio.run(make_stream(server.url))
        yield server.url


@contextmanager
def rabbitmq() -> Iterator[str]:
    with rabbitmq_server() as server:
        with BlockingConnection(URLParameters(server.url)) as connection:
            channel = connection.channel()
            channel.exchange_declare(RabbitMQOptions.exchange, "topic", durable=True)
            quorum = {"x-queue-type": "quorum"}
            channel.queue_declare(TOPIC, durable=True, arguments=quorum)
            channel.queue_bind(TOPIC, RabbitMQOptions.exchange, TOPIC)
        yield server.url


@contextmanager
def kafka() -> Iterator[str]:
    with real_kafka() as node:
        node.create_topic(TOPIC, partitions=4)
        yield node.url


@contextmanager
def sqs() -> Iterator[str]:
    async def make_queue(url: str) -> None:
        settings = SqsSettings.from_url(url)
        async with settings.client("sqs", connections=1, read_timeout=30) as client:
            await client.create_queue(QueueName=settings.name_of(TOPIC))

    with sqs_server() as server:
        asyncio.run(make_queue(server.url()))
        yield server.url()


@contextmanager
def http() -> Iterator[str]:
    with http_sink() as port:
        yield f"http://127.0.0.1:{port}/?unsigned=true&allow_private=true"


BROKERS: Mapping[str, Broker] = {
    "redis": Broker(label="Redis Streams", server=redis),
    "nats": Broker(label="NATS JetStream", server=nats_jetstream),
    "rabbitmq": Broker(label="RabbitMQ, quorum queue", server=rabbitmq),
    "kafka": Broker(label="Kafka, one node", server=kafka),
    "sqs": Broker(
        label="SQS, moto's server", server=sqs, messages=3_000, few_messages=2_000
    ),
    "http": Broker(label="HTTP", server=http, messages=30_000, few_messages=10_000),
}
