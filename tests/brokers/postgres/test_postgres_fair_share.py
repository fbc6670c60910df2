"""Tenants share a queue fairly, over the whole backlog of the postgres broker."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from inbox.events import MessageHandled
from inbox.source import Delivery
from inbox.sources.postgres import InboxSource
from pillarbox import Consumer, Message
from relay.publishers.postgres import PostgresPublisher
from tests.fixtures.consumers import async_sessions_of, running
from tests.fixtures.deliveries import subscribe_from_oldest
from tests.fixtures.sessions import execute
from tests.fixtures.urls import copy_of, with_options

FLOOD = """
    INSERT INTO inbox.message
           (message_id, lane, schema_version, topic, key, tenant,
            content_type, headers, payload)
    SELECT outbox.uuid7(), n %% 16, 1, 'orders',
           concat_ws(' ', %s::text, n %% 640), %s,
           'text/plain', '{}', convert_to(n::text, 'UTF8')
      FROM generate_series(1, %s) AS n
"""
IN_MEMORY = 1000


@pytest.fixture
async def sessions(
    database_url: str,
) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    async with async_sessions_of(database_url) as made:
        yield made


def flood(url: str, count: int, tenant: str | None = "flood") -> None:
    execute(url, FLOOD, (tenant, tenant, count))
    execute(url, "ANALYZE inbox.message")
    subscribe_from_oldest(url, topic="orders")


async def publish(url: str, *messages: Message) -> None:
    execute(
        url,
        "INSERT INTO inbox.subscription VALUES ('billing', 'orders')"
        " ON CONFLICT DO NOTHING",
    )
    async with PostgresPublisher(copy_of(url)) as publisher:
        await publisher.publish(messages)


async def take(source: InboxSource, least: int) -> list[Delivery]:
    """Receive as a consumer with 64 messages in flight does, and ack everything."""
    taken: list[Delivery] = []
    async with asyncio.timeout(60):
        while len(taken) < least:
            for delivery in await source.receive(limit=64):
                taken.append(delivery)
                await delivery.ack()
    return taken


def positions(taken: list[Delivery], tenant: str) -> list[int]:
    return [n for n, d in enumerate(taken) if d.message.tenant == tenant]


async def test_another_tenants_message_is_among_the_first_despite_a_flood(
    database_url: str,
) -> None:
    flood(database_url, 20_000)
    await publish(database_url, Message("orders", b"", key="k", tenant="other"))
    async with InboxSource(
        database_url, consumer="billing", topics=["orders"]
    ) as source:
        taken = await take(source, 64)
    assert positions(taken, "other")[0] < 2


async def test_a_message_published_during_a_flood_is_delivered_soon(
    database_url: str,
) -> None:
    flood(database_url, 20_000)
    async with InboxSource(
        database_url, consumer="billing", topics=["orders"]
    ) as source:
        await take(source, 500)
        await publish(database_url, Message("orders", b"", key="k", tenant="other"))
        taken = await take(source, IN_MEMORY)
    assert len(positions(taken, "other")) == 1


async def test_two_floods_get_equal_shares_in_order(
    database_url: str,
) -> None:
    flood(database_url, 3_000)
    flood(database_url, 3_000, tenant="also a flood")
    async with InboxSource(
        database_url, consumer="billing", topics=["orders"]
    ) as source:
        taken = await take(source, 2_000)
    shares = Counter(delivery.message.tenant for delivery in taken)
    assert min(shares.values()) > 0.4 * len(taken)
    for tenant in shares:
        for key in {d.message.key for d in taken}:
            numbers = [
                int(d.message.payload)
                for d in taken
                if (d.message.tenant, d.message.key) == (tenant, key)
            ]
            assert numbers == sorted(numbers)


async def test_many_tenants_all_get_their_turn(database_url: str) -> None:
    flood(database_url, 5_000)
    few = [
        Message("orders", b"", key=f"key {n}", tenant=f"tenant {n:03}")
        for n in range(200)
    ]
    await publish(database_url, *few)
    async with InboxSource(
        database_url, consumer="billing", topics=["orders"]
    ) as source:
        taken = await take(source, IN_MEMORY)
    assert len({d.message.tenant for d in taken}) == 201


async def test_each_message_is_delivered_once_in_any_order(
    database_url: str,
) -> None:
    flood(database_url, 3_000)
    flood(database_url, 700, tenant="b")
    flood(database_url, 300, tenant=None)
    async with InboxSource(
        with_options(database_url, prefetch=64), consumer="billing", topics=["orders"]
    ) as source:
        taken = await take(source, 4_000)
        assert await source.receive(limit=64) == []
    assert len({d.message.id for d in taken}) == len(taken) == 4_000
    assert execute(
        database_url,
        "SELECT count(*) FROM inbox.delivery_status WHERE acked_at IS NULL",
    ) == [(0,)]


async def test_a_failure_of_a_hidden_tenant_blocks_only_its_key(
    database_url: str,
) -> None:
    flood(database_url, 2_000)
    first, second, other = (
        Message("orders", b"", key=key, tenant="other") for key in ("k", "k", "l")
    )
    await publish(database_url, first)
    async with InboxSource(
        database_url, consumer="billing", topics=["orders"]
    ) as source:
        taken = await source.receive(limit=64)
        (found,) = (d for d in taken if d.message.tenant == "other")
        await found.nack(timedelta(hours=1))
        await publish(database_url, second, other)
        taken = await take(source, IN_MEMORY)
    assert [d.message.id for d in taken if d.message.tenant == "other"] == [other.id]


async def test_a_tenant_at_its_limit_does_not_delay_others(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    flood(database_url, 3_000)
    at_work: Counter[str | None] = Counter()
    most: Counter[str | None] = Counter()
    gate = asyncio.Event()
    consumer = Consumer(
        copy_of(database_url),
        sessions,
        name="billing",
        max_in_flight=8,
        max_in_flight_per_tenant=2,
        max_waiting=64,
    )

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        at_work[message.tenant] += 1
        most[message.tenant] = max(most[message.tenant], at_work[message.tenant])
        if message.tenant == "flood":
            await gate.wait()
        at_work[message.tenant] -= 1

    others = [
        Message("orders", b"", key=f"{n}", tenant=f"tenant {n % 3}") for n in range(30)
    ]
    async with running(consumer) as events:
        await publish(database_url, *others)
        # The flood's handlers wait, and use all of its slots.
        await events.wait_for(MessageHandled, 30)
        assert at_work["flood"] == 2
        gate.set()
        await events.wait_for(MessageHandled, 300)
    assert max(most.values()) == 2
