"""Urgent messages behind thousands of others are handled among the next ones."""

import asyncio
from collections.abc import Sequence

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from pillarbox import Message
from pillarbox.outbox.lane import Priority
from tests.fixtures.adapters import Adapters, adapters_of
from tests.fixtures.consumers import consuming
from tests.fixtures.variants import as_variant

READ_AHEAD = (
    *("redis", "rabbitmq", "nats", "kafka", "postgres"),
    *map(as_variant, ("memory", "rabbitmq in shards")),
)
BULK = 5000
URGENT = 10
BATCH = 500


@pytest.fixture(params=READ_AHEAD)
def adapters(request: pytest.FixtureRequest) -> Adapters:
    return adapters_of(request.param, request)


def numbered(
    topic: str, count: int, priority: Priority, keys: int = 300
) -> Sequence[Message]:
    return [
        Message(topic, b"%d" % n, key=f"key {n % keys}", priority=priority)
        for n in range(count)
    ]


async def test_realtime_messages_behind_a_flood_of_bulk_are_among_the_next_handled(
    adapters: Adapters, database_url: str
) -> None:
    topic = adapters.topics[0]
    bulk = numbered(topic, BULK, Priority.BULK)
    urgent = numbered(topic, URGENT, Priority.REALTIME)
    handled: list[Message] = []
    are_published, are_handled = asyncio.Event(), asyncio.Event()

    async def handle(session: AsyncSession, message: Message) -> None:
        await are_published.wait()
        await session.execute(text("SELECT 1"))
        handled.append(message)
        if sum(m.priority is Priority.REALTIME for m in handled) == URGENT:
            are_handled.set()

    source = adapters.source("billing")
    async with consuming(database_url, source, handle, topic=topic):
        async with adapters.publisher() as publisher:
            for start in range(0, BULK, BATCH):
                await publisher.publish(bulk[start : start + BATCH])
            await publisher.publish(urgent)
        are_published.set()
        await are_handled.wait()
        assert len(handled) < BULK / 5


async def test_realtime_messages_do_not_wait_for_a_flood_of_one_key(
    adapters: Adapters, database_url: str
) -> None:
    topic = adapters.topics[0]
    bulk = numbered(topic, BULK, Priority.BULK, keys=1)
    urgent = numbered(topic, URGENT, Priority.REALTIME)
    left = {message.id for message in urgent}
    are_handled = asyncio.Event()

    async def handle(session: AsyncSession, message: Message) -> None:
        left.discard(message.id)
        if not left:
            are_handled.set()
        # So the flood's key is stuck until then.
        await are_handled.wait()

    source = adapters.source("billing")
    async with consuming(database_url, source, handle, topic=topic):
        async with adapters.publisher() as publisher:
            for start in range(0, BULK, BATCH):
                await publisher.publish(bulk[start : start + BATCH])
            await publisher.publish(urgent)
        await are_handled.wait()
