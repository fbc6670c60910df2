"""A paused consumer or topic: no handler begins until somebody resumes."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from itertools import count, islice
from typing import Any

import pytest

from pillarbox import Consumer, Message
from pillarbox.inbox.events import (
    ConsumerStarted,
    DeliveryReturned,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
)
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.inbox.sources.postgres.outbox_source import PostgresSource
from pillarbox.outbox.events import ProcessMeasured
from pillarbox.outbox.observability.health import Health
from pillarbox.outbox.retry import RetryPolicy
from tests.fixtures.consumers import consuming, numbered, running, sessions_by
from tests.fixtures.pauses import change, seen
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("quick_beats")]

TERMS: dict[str, dict[str, Any]] = {
    "single": {},
    "batch": {"batch": 10},
    "job": {"lease": timedelta(seconds=10)},
}


async def handle(session: Any, one_or_many: Any) -> None:
    """Handle anything."""


@pytest.mark.parametrize("kind", TERMS)
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_paused_consumer_begins_no_handler_until_somebody_resumes(
    database_url: str, kind: str, driver: str
) -> None:
    change(database_url, "pause", "billing")
    source = MemorySource(*numbered(3))
    work: Callable[..., Any] = handle
    if driver == "psycopg":
        work = lambda _, message: None  # noqa: E731
    health = Health(ConsumerStarted)
    async with consuming(
        database_url, source, work, TERMS[kind], driver=driver, observers=[health]
    ) as events:
        await seen(events, "*")
        await events.wait_for(ProcessMeasured, len(events.of(ProcessMeasured)) + 5)
        assert not events.of(MessageHandled), "not even a replica that starts later"
        assert health.waits_for == [], "it stays ready"
        change(database_url, "resume", "billing")
        await events.wait_for(MessageHandled, 3)


async def test_what_is_in_flight_ends_and_what_was_fetched_waits(
    database_url: str,
) -> None:
    may_end = asyncio.Event()

    async def slow(session: Any, message: Message) -> None:
        await may_end.wait()

    source = MemorySource(*numbered(5))
    async with consuming(database_url, source, slow, max_in_flight=1) as events:
        change(database_url, "pause", None, "*")
        await seen(events, "*")
        may_end.set()
        await events.wait_for(MessageHandled)
        await events.wait_for(ProcessMeasured, len(events.of(ProcessMeasured)) + 5)
        assert len(events.of(MessageHandled)) == 1
        assert source.waiting == 4
        change(database_url, "resume", None, "*")
        await events.wait_for(MessageHandled, 5)


async def test_a_flood_of_a_paused_topic_holds_up_no_other_one(
    database_url: str,
) -> None:
    change(database_url, "pause", "billing", "orders.*")
    flood = [Message("orders.placed", n) for n in range(400)]
    source = MemorySource(*flood, Message("mail", 1))
    async with consuming(
        database_url, source, handle, max_in_flight=2, max_waiting=20
    ) as events:
        (handled,) = await events.wait_for(MessageHandled)
        assert handled.topic == "mail"
    assert source.waiting == len(flood)


async def test_a_retry_waits_and_keeps_the_attempts_that_were_counted(
    database_url: str,
) -> None:
    calls: list[Message] = []

    async def fail(session: Any, message: Message) -> None:
        calls.append(message)
        raise ValueError("no")

    policy = RetryPolicy(max_attempts=2, first_delay=timedelta(seconds=1))
    source = MemorySource(Message("orders", 1))
    async with consuming(database_url, source, fail, retry=policy) as events:
        await events.wait_for(HandlerFailed)
        change(database_url, "pause", "billing", "orders")
        await seen(events, "orders")
        await asyncio.to_thread(execute, database_url, "SELECT pg_sleep(1.5)")
        assert not events.of(MessageDeadLettered)
        change(database_url, "resume", "billing", "orders")
        (letter,) = await events.wait_for(MessageDeadLettered)
    assert letter.attempts == len(calls) == 2


async def test_a_pause_of_another_consumer_changes_nothing(database_url: str) -> None:
    change(database_url, "pause", "mail")
    source = MemorySource(*numbered(2))
    async with consuming(database_url, source, handle) as events:
        await events.wait_for(MessageHandled, 2)


async def test_a_consumer_of_the_outbox_keeps_its_lanes_while_it_is_paused(
    database_url: str,
) -> None:
    locks = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid IN (SELECT"
        " pid FROM pg_stat_activity WHERE application_name LIKE '% lease')"
    )
    async with sessions_by(database_url, "asyncpg") as sessions:
        source = PostgresSource(database_url, consumer="billing", topics=["orders"])
        consumer = Consumer(source, sessions, name="billing")
        consumer.handles("orders")(handle)
        async with running(consumer) as events:
            insert(database_url, *numbered(1))
            await events.wait_for(MessageHandled)
            before = execute(database_url, locks)
            change(database_url, "pause", "billing")
            await seen(events, "*")
            insert(database_url, *numbered(3, keys=3))
            await events.wait_for(ProcessMeasured, len(events.of(ProcessMeasured)) + 9)
            assert len(events.of(MessageHandled)) == 1
            assert execute(database_url, locks) == before
            change(database_url, "resume", "billing")
            await events.wait_for(MessageHandled, 4)


def flood_of(keys: Iterator[int]) -> list[Message]:
    return [Message("orders", n, key=f"key {n}") for n in islice(keys, 20)]


async def test_replicas_keep_their_lanes_although_a_flood_of_a_topic_is_paused(
    database_url: str,
) -> None:
    change(database_url, "pause", "billing", "orders")
    keys = count()
    insert(database_url, *flood_of(keys))
    async with (
        sessions_by(database_url, "asyncpg") as sessions,
        AsyncExitStack() as stack,
    ):
        replicas = []
        for _ in range(2):
            topics = ["orders", "mail"]
            source = PostgresSource(database_url, consumer="billing", topics=topics)
            consumer = Consumer(
                source, sessions, name="billing", max_in_flight=2, max_waiting=8
            )
            for topic in topics:
                consumer.handles(topic)(handle)
            replicas.append(await stack.enter_async_context(running(consumer)))
        # Until it has lanes, a replica gets nothing that another one has claimed.
        while any(len(events.of(DeliveryReturned)) < 20 for events in replicas):
            insert(database_url, *flood_of(keys))
            measured = len(replicas[0].of(ProcessMeasured))
            await replicas[0].wait_for(ProcessMeasured, measured + 2)
        mails = [Message("mail", n, key=f"m{n}") for n in range(40)]
        insert(database_url, *mails)
        async with asyncio.timeout(20):
            while sum(len(it.of(MessageHandled)) for it in replicas) < len(mails):
                await replicas[0].wait_for(
                    ProcessMeasured, len(replicas[0].of(ProcessMeasured)) + 1
                )
        handled = [event for it in replicas for event in it.of(MessageHandled)]
        assert {event.topic for event in handled} == {"mail"}
