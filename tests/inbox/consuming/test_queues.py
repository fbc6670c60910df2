"""Several queues in one consumer: separate sources and buffers, shared slots."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from pillarbox import Consumer, Message
from pillarbox.inbox.events import DeliveriesReceived, DuplicateSkipped, MessageHandled
from pillarbox.inbox.sources.memory import MemorySource
from tests.fixtures.consumers import async_sessions_of, consuming, numbered, running
from tests.fixtures.readers import add_consumer
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute


@pytest.fixture
async def sessions(
    database_url: str,
) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    async with async_sessions_of(database_url) as made:
        yield made


def flood(count: int = 500, *, tenant: str | None = None) -> list[Message]:
    return [Message("bulk", b"", key=f"{n}", tenant=tenant) for n in range(count)]


async def test_a_flood_in_one_queue_delays_no_other(
    sessions: async_sessionmaker[AsyncSession],
) -> None:
    bulk, urgent = MemorySource(*flood()), MemorySource()
    handled: list[str] = []
    gate, begun = asyncio.Event(), asyncio.Event()
    consumer = Consumer(
        {"batch": bulk, "realtime": urgent},
        sessions,
        name="billing",
        queues={"realtime": 2, "batch": 1},
        max_in_flight=2,
    )

    @consumer.handles("bulk", queue="batch")
    @consumer.handles("urgent", queue="realtime")
    async def handle(session: AsyncSession, message: Message) -> None:
        if not gate.is_set():
            begun.set()
            await gate.wait()
        handled.append(message.topic)

    async with running(consumer) as events:
        await begun.wait()
        urgent.add(*(Message("urgent", b"") for _ in range(6)))
        await events.wait_for(DeliveriesReceived, 2)
        assert {event.queue for event in events.of(DeliveriesReceived)} == {
            "batch",
            "realtime",
        }
        gate.set()
        await events.wait_for(MessageHandled, 30)
    # Two were already running; then the six get at least two slots in three.
    assert handled.index("urgent") < 6
    assert handled[:16].count("urgent") == 6


async def test_each_queue_has_a_group_and_one_receipt_serves_all(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = Consumer(database_url, sessions, name="billing")

    async def handle(session: AsyncSession, message: Message) -> None: ...

    consumer.handles("orders")(handle)
    consumer.handles("bulk", queue="batch")(handle)
    async with running(consumer) as events:
        subscriptions = execute(
            database_url,
            "SELECT reader, topic FROM outbox.subscription"
            " WHERE reader <> 'main' ORDER BY 1",
        )
        assert subscriptions == [("billing", "orders"), ("billing--batch", "bulk")]
        insert(database_url, Message("orders", b""), Message("bulk", b""))
        await events.wait_for(MessageHandled, 2)
    receipts = execute(database_url, "SELECT DISTINCT consumer FROM inbox.receipt")
    assert receipts == [("billing",)]


async def test_a_topic_that_changes_its_queue_is_handled_once(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    add_consumer(database_url, "billing", "orders")
    consumer = Consumer(database_url, sessions, name="billing")

    async def handle(session: AsyncSession, message: Message) -> None: ...

    consumer.handles("orders", queue="batch")(handle)
    consumer.handles("refunds")(handle)
    async with running(consumer) as events:
        insert(database_url, Message("orders", b""))
        await events.wait_for(MessageHandled)
        await events.wait_for(DuplicateSkipped)


async def test_without_order_messages_of_a_key_do_not_wait_for_each_other(
    sessions: async_sessionmaker[AsyncSession],
) -> None:
    meet = asyncio.Barrier(3)
    source = MemorySource(*numbered(3))
    consumer = Consumer(source, sessions, name="billing", order="none")

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        async with asyncio.timeout(60):
            await meet.wait()  # fails unless all three run at once

    async with running(consumer) as events:
        await events.wait_for(MessageHandled, 3)


async def test_tenants_share_the_prefetched_messages(database_url: str) -> None:
    other = Message("bulk", b"", key="k", tenant="other")
    source = MemorySource(*flood(9, tenant="flood"), other)
    begun: asyncio.Queue[str | None] = asyncio.Queue()
    gate = asyncio.Semaphore(0)

    async def handle(session: AsyncSession, message: Message) -> None:
        begun.put_nowait(message.tenant)
        await gate.acquire()

    async with consuming(database_url, source, handle, max_in_flight=5) as events:
        for _ in range(5):
            assert await begun.get() == "flood"
        gate.release()
        gate.release()
        assert {await begun.get(), await begun.get()} == {"flood", "other"}
        for _ in range(8):
            gate.release()
        await events.wait_for(MessageHandled, 10)
