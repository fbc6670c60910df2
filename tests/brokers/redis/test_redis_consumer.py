"""From Redis Streams through a consumer: unreadable entries stop nothing."""

import asyncio
from typing import Any

import pytest
from redis import Redis
from sqlalchemy.ext.asyncio import AsyncSession

from inbox import Consumer
from inbox.events import MessageDeadLettered, MessageHandled
from inbox.source import Delivery
from inbox.sources.redis import RedisSource
from outbox import Message
from outbox.errors import ConfigError
from relay.publisher import Acked
from relay.publishers.redis import RedisPublisher
from tests.fixtures.consumers import NEVER, async_sessions_of, running
from tests.fixtures.sessions import execute

RAW = b"\xff\x00 raw"
LETTERS = """
    SELECT message_id, topic, payload, attempts, status, error_reason
      FROM inbox.dead_letter
"""


async def publish(url: str, message: Message) -> None:
    async with RedisPublisher.from_url(url) as publisher:
        assert await publisher.publish([message]) == [Acked()]


@pytest.mark.parametrize(
    ("id", "says"),
    [(None, "id"), (b"evt_1", "isn't a UUID"), (b"", "id"), (b"\xff", "id")],
    ids=["no id", "an id of another format", "an empty id", "an id that isn't text"],
)
async def test_a_delivery_with_an_invalid_id_is_dead_lettered_and_the_next_handled(
    database_url: str, redis_url: str, id: bytes | None, says: str
) -> None:
    handled: list[bytes] = []
    with Redis.from_url(redis_url, protocol=2) as client:
        await publish(redis_url, Message("orders", b"before", key="k"))
        ((_, fields),) = client.xrange("orders")
        broken: dict[Any, Any] = {**fields, b"payload": RAW}
        del broken[b"id"]
        client.xadd("orders", broken if id is None else {**broken, b"id": id})
        await publish(redis_url, Message("orders", b"after", key="k"))

        async with async_sessions_of(database_url) as sessions:
            source = RedisSource(redis_url, consumer="billing", topics=["orders"])
            consumer = Consumer(source, sessions, name="billing", retry=NEVER)

            @consumer.handles("orders")
            async def handle(session: AsyncSession, message: Message) -> None:
                handled.append(message.payload)

            async with running(consumer) as events:
                await events.wait_for(MessageHandled, 2)
                (given_up,) = await events.wait_for(MessageDeadLettered)

        pending: Any = client.xpending("orders", "billing")
        assert pending["pending"] == 0
    assert handled == [b"before", b"after"]
    ((message_id, *letter, reason),) = execute(database_url, LETTERS)
    assert message_id.startswith("sha256:")
    assert letter == ["orders", RAW, 0, "PENDING"]
    assert reason == given_up.reason
    assert says in reason


async def test_a_url_can_set_when_a_dead_replicas_deliveries_are_reclaimed(
    redis_url: str,
) -> None:
    await publish(redis_url, Message("orders", b"left", key="k"))
    with Redis.from_url(redis_url, protocol=2) as client:
        client.xgroup_create("orders", "billing", id="0")
        client.xreadgroup("billing", "dead", {"orders": ">"})

    url = f"{redis_url}?reclaim_after=1s"
    async with (
        RedisSource.from_url(url, consumer="billing", topics=["orders"]) as source,
        asyncio.timeout(90),
    ):
        taken: list[Delivery] = []
        while not taken:
            taken += await source.receive(limit=1)

    assert taken[0].message.payload == b"left"


def test_an_invalid_duration_in_the_url_is_reported(redis_url: str) -> None:
    with pytest.raises(ConfigError, match="reclaim_after='soon': write a duration"):
        RedisSource.from_url(
            f"{redis_url}?reclaim_after=soon", consumer="billing", topics=["orders"]
        )
