"""What a dead replica of the postgres broker left: counted, and handed out alone."""

import asyncio
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from inbox.source import Delivery
from inbox.sources.postgres import PostgresSource
from inbox.sources.postgres.lanes import Claimed
from inbox.sources.postgres.queue import Queue
from inbox.testing.crash import die_holding
from outbox import Message
from relay.publishers.postgres import PostgresPublisher
from tests.fixtures.consumers import numbered
from tests.fixtures.relay import execute

pytestmark = pytest.mark.timeout(180)

SUBSCRIBE = "INSERT INTO inbox.subscription VALUES ('billing', 'orders')"


def source(url: str) -> PostgresSource:
    return PostgresSource(
        url,
        consumer="billing",
        topics=["orders"],
        lease=timedelta(seconds=2),
        sweep_interval=timedelta(milliseconds=200),
    )


async def publish(url: str, *messages: Message) -> None:
    async with PostgresPublisher.from_url(url) as publisher:
        await publisher.publish(messages)


async def receive(consumer: PostgresSource, count: int) -> list[Delivery]:
    received: list[Delivery] = []
    async with asyncio.timeout(60):
        while len(received) < count:
            received += await consumer.receive(limit=100)
    return received


def attempts(url: str) -> list[int]:
    rows = execute(url, "SELECT attempts FROM inbox.delivery ORDER BY seq")
    return [count for (count,) in rows]


async def test_what_was_there_is_counted_until_it_comes_back_untried(
    database_url: str,
) -> None:
    execute(database_url, SUBSCRIBE)
    await publish(database_url, *numbered(4))
    async with source(database_url) as consumer:
        deliveries = await receive(consumer, 4)
        assert {delivery.attempts for delivery in deliveries} == {0}
        assert attempts(database_url) == [1, 1, 1, 1]
        await deliveries[0].ack()
        await deliveries[1].nack(timedelta(hours=1))
        await deliveries[2].nack()
    assert attempts(database_url) == [1, 1, 0, 0]


async def test_what_comes_later_is_not_counted(database_url: str) -> None:
    async with source(database_url) as consumer:
        await publish(database_url, *numbered(1))
        await receive(consumer, 1)
        await publish(database_url, *numbered(3, keys=3))
        await receive(consumer, 3)
        assert attempts(database_url)[1:] == [0, 0, 0]


async def test_what_was_given_back_untried_comes_before_the_rest_of_its_key(
    database_url: str,
) -> None:
    execute(database_url, SUBSCRIBE)
    await publish(database_url, *numbered(5))
    async with source(database_url) as consumer:
        deliveries = await receive(consumer, 5)
        for delivery in reversed(deliveries[1:]):
            await delivery.nack()
        again = await receive(consumer, 4)
        assert [int(d.message.payload) for d in again] == [1, 2, 3, 4]
        assert {delivery.attempts for delivery in again} == {0}


async def test_what_a_dead_replica_had_in_work_comes_alone(database_url: str) -> None:
    execute(database_url, SUBSCRIBE)
    await publish(database_url, *numbered(3, keys=3))
    await die_holding(partial(source, database_url), 3)
    async with source(database_url) as consumer:
        for _ in range(3):
            (delivery,) = await receive(consumer, 1)
            assert delivery.attempts == 1
            await delivery.ack()
    assert attempts(database_url) == [2, 2, 2]


async def test_a_failure_of_what_was_counted_counts_once(database_url: str) -> None:
    execute(database_url, SUBSCRIBE)
    await publish(database_url, *numbered(1))
    async with source(database_url) as consumer:
        for failures in range(3):
            (delivery,) = await receive(consumer, 1)
            assert delivery.attempts == failures
            await delivery.nack(timedelta(milliseconds=1))
    assert attempts(database_url) == [3]


async def test_what_its_last_holder_changes_meanwhile_is_not_overtaken_by_its_key(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(database_url, SUBSCRIBE)
    await publish(database_url, *numbered(4))
    hand_out = Queue.hand_out
    changes = ["UPDATE inbox.delivery SET attempts = 1 WHERE payload = '1'"]

    def change_and_hand_out(queue: Queue, *arguments: Any) -> list[Claimed]:
        rows = hand_out(queue, *arguments)
        while rows and changes:
            execute(database_url, changes.pop())
        return rows

    monkeypatch.setattr(Queue, "hand_out", change_and_hand_out)
    came: list[int] = []
    async with source(database_url) as consumer:
        while len(came) < 4:
            for delivery in await receive(consumer, 1):
                came.append(int(delivery.message.payload))
                await delivery.ack()
    assert came == [0, 1, 2, 3]
    assert attempts(database_url) == [1, 2, 1, 1]
