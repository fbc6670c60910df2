"""A row that the owner inserts by hand can't forge its message's attributes."""

from collections.abc import Callable
from typing import Any, TypeAlias
from uuid import uuid4

import pytest

from inbox.events import MessageHandled
from inbox.source import Source
from inbox.sources.nats import NatsSource
from inbox.sources.rabbitmq import RabbitMQSource
from inbox.sources.redis import RedisSource
from outbox.lane import Priority, lane_of
from pillarbox import Consumer, Message, uuid7
from relay.events import MessageDeadLettered
from relay.publisher import Publisher
from relay.publishers.nats import NatsPublisher
from relay.publishers.rabbitmq import RabbitMQPublisher
from relay.publishers.redis import RedisPublisher
from tests.fixtures.consumers import async_sessions_of
from tests.fixtures.consumers import running as consuming
from tests.fixtures.relay import dead_letters, insert
from tests.fixtures.relay import running as relaying
from tests.fixtures.sessions import execute

FORGED = ("ce_tenant", "ce-tenant", "cloudEvents:tenant", "cloudEvents_tenant")
Broker: TypeAlias = tuple[Publisher, Source, str]


@pytest.fixture(params=["redis", "nats", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> Broker:
    """A real broker's publisher and source, and a topic that no other test uses."""
    asked: Callable[[str], Any] = request.getfixturevalue
    consumer = f"billing-{uuid4().hex}"
    match request.param:
        case "redis":
            url, topic = asked("redis_url"), "orders"
            source: Source = RedisSource(url, consumer=consumer, topics=[topic])
            return RedisPublisher(url), source, topic
        case "nats":
            url, topic = asked("shared_nats").url, f"{asked('nats_topics')}.orders"
            source = NatsSource(url, consumer=consumer, topics=[topic])
            return NatsPublisher(url), source, topic
        case _:
            url, topic = asked("rabbitmq_url"), "orders"
            source = RabbitMQSource(url, consumer=consumer, topics=[topic])
            return RabbitMQPublisher(url), source, topic


def insert_by_hand(url: str, topic: str, name: str) -> None:
    id = uuid7()
    execute(
        url,
        "INSERT INTO outbox.message (id, lane, schema_version, topic, content_type,"
        " headers, payload) VALUES (%s, %s, 1, %s, 'text/plain',"
        " jsonb_build_object(%s::text, 'forged'), 'forged')",
        [id, lane_of(None, id, Priority.DEFAULT), topic, name],
    )


async def test_a_consumer_never_sees_a_tenant_forged_by_a_header(
    database_url: str, broker: Broker
) -> None:
    publisher, source, topic = broker
    handled: list[tuple[bytes, str | None]] = []
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(source, sessions, name="billing")

        @consumer.handles("*")
        async def handle(session: Any, message: Message) -> None:
            handled.append((message.payload, message.tenant))

        async with consuming(consumer) as consumed:
            for name in FORGED:
                insert_by_hand(database_url, topic, name)
            insert(database_url, Message(topic, b"no tenant"))
            insert(database_url, Message(topic, b"a tenant", tenant="acme"))
            async with relaying(database_url, publisher) as relay:
                await relay.events.wait_for(MessageDeadLettered, len(FORGED))
                await consumed.wait_for(MessageHandled, 2)

    assert sorted(handled) == [(b"a tenant", "acme"), (b"no tenant", None)]
    reasons = [reason for _, _, reason in dead_letters(database_url)]
    assert len(reasons) == len(FORGED)
    for name in FORGED:
        assert any(f"'{name}': is a reserved name" in reason for reason in reasons)
