"""The postgres broker reports messages that a dead replica may have started."""

import asyncio
from datetime import timedelta
from functools import partial

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from pillarbox import Message
from pillarbox.inbox.events import MessageHandled
from pillarbox.inbox.poison.history import FIRST_DELIVERY, REDELIVERED, TakenOver
from pillarbox.inbox.source import Delivery
from pillarbox.inbox.sources.postgres import PostgresSource
from pillarbox.inbox.testing.crash import die_holding
from tests.fixtures.consumers import consuming, numbered
from tests.fixtures.readers import add_consumer
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute
from tests.fixtures.urls import with_options

pytestmark = pytest.mark.timeout(180)


def source(url: str, lease: timedelta = timedelta(seconds=2)) -> PostgresSource:
    return PostgresSource(
        with_options(url, lease=lease),
        consumer="billing",
        topics=["orders"],
        poll_interval=timedelta(milliseconds=100),
    )


async def receive(consumer: PostgresSource, count: int) -> list[Delivery]:
    received: list[Delivery] = []
    async with asyncio.timeout(60):
        while len(received) < count:
            received += await consumer.receive(limit=100)
    return received


async def test_messages_older_than_the_lease_are_reported_as_possibly_started(
    database_url: str,
) -> None:
    add_consumer(database_url, "billing", "orders")
    insert(database_url, *numbered(3))
    async with source(database_url) as consumer:
        before = await receive(consumer, 3)
        insert(database_url, *numbered(3))
        later = await receive(consumer, 3)
    assert [isinstance(d.history, TakenOver) for d in before] == [True] * 3
    assert [d.history for d in later] == [FIRST_DELIVERY] * 3


async def test_a_failed_message_counts_as_started(database_url: str) -> None:
    # On a busy machine, a shorter one can end while the failure is recorded.
    async with source(database_url, lease=timedelta(minutes=1)) as consumer:
        # The first receive leases the lanes.
        insert(database_url, *numbered(1))
        await receive(consumer, 1)
        insert(database_url, Message("orders", b""))
        (delivery,) = await receive(consumer, 1)
        await delivery.nack(timedelta(milliseconds=1))
        (again,) = await receive(consumer, 1)
    assert (again.attempts, again.history) == (1, REDELIVERED)


async def test_a_claim_writes_nothing_even_after_a_crash(database_url: str) -> None:
    add_consumer(database_url, "billing", "orders")
    insert(database_url, *numbered(3, keys=3))
    await die_holding(partial(source, database_url), 3)
    async with source(database_url) as consumer:
        assert {d.attempts for d in await receive(consumer, 3)} == {0}
    attempts = "SELECT DISTINCT attempts FROM outbox.message_status"
    assert execute(database_url, attempts) == [(0,)]


async def test_deliveries_that_a_dead_replica_held_but_did_not_start_are_not_charged(
    database_url: str,
) -> None:
    add_consumer(database_url, "billing", "orders")
    messages = numbered(3, keys=3)
    insert(database_url, *messages)
    await die_holding(partial(source, database_url), 3)
    seen: list[int] = []

    async def handle(session: AsyncSession, message: Message) -> None:
        query = "SELECT starts FROM inbox.suspect WHERE message_id = %s"
        ((starts,),) = await asyncio.to_thread(
            execute, database_url, query, [message.id]
        )
        seen.append(starts)

    async with consuming(database_url, source(database_url), handle) as events:
        await events.wait_for(MessageHandled, 3)
    assert seen == [1, 1, 1]
    assert execute(database_url, "SELECT 1 FROM inbox.suspect") == []
