"""The postgres source: a consumer's deliveries, shared by its replicas, in order."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from inbox.source import Delivery
from inbox.sources.postgres import PostgresSource
from inbox.sources.postgres.lanes import ClaimedDelivery, DeliveryLanes
from inbox.sources.postgres.queue import Queue, Settled
from outbox import Message, uuid7
from outbox.errors import BrokerUnavailableError, ConfigError
from outbox.lane import bucket_of
from outbox.postgres.connection import Link, conninfo
from relay.publishers.postgres import PostgresPublisher
from tests.fixtures.consumers import numbered
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.sessions import execute

HOUR = timedelta(hours=1)
ALL_LANES = range(16)
MAKE_DUE = """
    INSERT INTO inbox.redelivery (created_at, seq, attempts, lane, cause, consumer, key,
                                  due_at)
    SELECT created_at, seq, attempts, lane, 'refused', consumer, key, now()
      FROM inbox.delivery_status
     WHERE attempts = 1 AND acked_at IS NULL
"""
INSERT = """
    INSERT INTO inbox.delivery (message_id, lane, schema_version, consumer, topic, key,
                                content_type, headers, payload)
    VALUES (%(id)s, %(lane)s, 1, 'billing', 'orders', %(key)s, 'text/plain', '{}', '0')
"""


@asynccontextmanager
async def source(url: str, **changes: Any) -> AsyncIterator[PostgresSource]:
    quick: dict[str, Any] = {
        "poll_interval": timedelta(milliseconds=100),
        "sweep_interval": timedelta(milliseconds=200),
        "lease": timedelta(seconds=2),
    }
    async with PostgresSource(
        url, consumer="billing", topics=["orders*"], **(quick | changes)
    ) as entered:
        yield entered


async def publish(url: str, *messages: Message) -> None:
    async with PostgresPublisher.from_url(url) as publisher:
        await publisher.publish(messages)


async def receive(
    source: PostgresSource, count: int, *, limit: int = 100
) -> list[Delivery]:
    received: list[Delivery] = []
    async with asyncio.timeout(20):
        while len(received) < count:
            received += await source.receive(limit=limit)
    return received


async def nothing_arrives(source: PostgresSource, times: int = 3) -> bool:
    return not any([await source.receive(limit=100) for _ in range(times)])


def payloads(deliveries: Sequence[Delivery]) -> list[int]:
    return sorted(int(delivery.message.payload) for delivery in deliveries)


def unacked(url: str) -> int:
    query = "SELECT count(*) FROM inbox.delivery_status WHERE acked_at IS NULL"
    ((count,),) = execute(url, query)
    return int(count)


async def test_a_message_arrives_as_it_was_published(database_url: str) -> None:
    message = Message(
        "orders.placed",
        bytes(range(256)),
        key="ä",
        tenant="acme",
        headers={"h": "ü"},
        content_type="x/y",
        schema_version=7,
    )
    async with source(database_url) as consumer:
        await publish(database_url, message)
        (delivery,) = await receive(consumer, 1)
    assert delivery.message == message
    assert (delivery.attempts, delivery.problem) == (0, None)


async def test_keys_are_in_order_without_duplicates(database_url: str) -> None:
    async with source(database_url, prefetch=7) as consumer:
        await publish(database_url, *numbered(100, keys=10))
        deliveries = await receive(consumer, 100, limit=5)
        seen: dict[str | None, list[int]] = defaultdict(list)
        for delivery in deliveries:
            seen[delivery.message.key].append(int(delivery.message.payload))
            await delivery.ack()
        assert await nothing_arrives(consumer)
    assert {key: sorted(numbers) for key, numbers in seen.items()} == seen
    assert payloads(deliveries) == list(range(100))
    assert unacked(database_url) == 0


async def test_the_limit_holds(database_url: str) -> None:
    async with source(database_url) as consumer:
        await publish(database_url, *numbered(10, keys=10))
        assert len(await receive(consumer, 1, limit=3)) == 3


async def test_unacked_messages_are_redelivered_elsewhere(database_url: str) -> None:
    async with source(database_url) as consumer:
        await publish(database_url, *numbered(4, keys=4))
        deliveries = await receive(consumer, 4)
        await deliveries[0].ack()
        await deliveries[1].nack()
    async with source(database_url) as consumer:
        again = await receive(consumer, 3)
        assert payloads(again) == payloads(deliveries[1:])
        assert {delivery.attempts for delivery in again} == {0}


async def test_a_nack_without_delay_redelivers_at_once_and_in_order(
    database_url: str,
) -> None:
    async with source(database_url) as consumer:
        await publish(database_url, *numbered(3))
        for delivery in reversed(await receive(consumer, 3)):
            await delivery.nack()
        again = await receive(consumer, 3)
    assert [int(delivery.message.payload) for delivery in again] == [0, 1, 2]


async def test_a_nack_with_delay_blocks_its_key_and_no_other(
    database_url: str,
) -> None:
    async with source(database_url) as consumer:
        await publish(database_url, *numbered(2, keys=2))
        first, other = sorted(
            await receive(consumer, 2), key=lambda d: int(d.message.payload)
        )
        await first.nack(HOUR)
        await other.ack()
        await publish(
            database_url,
            Message("orders", b"2", key="key 0"),
            Message("orders", b"3", key="key 1"),
        )
        assert payloads(await receive(consumer, 1)) == [3]
        assert await nothing_arrives(consumer)
    async with source(database_url) as another:
        # The lane's next owner knows of the blocked key, too.
        assert payloads(await receive(another, 1)) == [3]
        assert await nothing_arrives(another)
        execute(database_url, MAKE_DUE)
        again = await receive(another, 2)
    assert [int(delivery.message.payload) for delivery in again] == [0, 2]
    assert [delivery.attempts for delivery in again] == [1, 0]


async def test_a_nacked_delivery_is_redelivered_when_due(database_url: str) -> None:
    async with source(database_url, sweep_interval=HOUR) as consumer:
        await publish(database_url, *numbered(1))
        for attempts in range(3):
            (delivery,) = await receive(consumer, 1)
            assert delivery.attempts == attempts
            await delivery.nack(timedelta(milliseconds=20))


@pytest.mark.parametrize("began", ["earlier", "later"])
async def test_a_message_that_commits_late_is_not_overtaken(
    began: str, database_url: str
) -> None:
    late, after = (Message("orders", b"", key="late") for _ in range(2))
    lane, url = bucket_of(late.key, late.id), conninfo(database_url)
    async with source(database_url, sweep_interval=HOUR) as consumer:
        with psycopg.connect(url) as slow, psycopg.connect(url) as quick:
            if began == "earlier":
                # Its id is lower: the snapshot after its commit ends below the late id.
                quick.execute("SELECT pg_current_xact_id()")
            slow.execute(INSERT, {"id": late.id, "lane": lane, "key": late.key})
            for _ in range(3):
                quick.execute(INSERT, {"id": uuid7(), "lane": lane, "key": "other"})
                quick.commit()
                (delivery,) = await receive(consumer, 1)
                assert delivery.message.key == "other"
                await delivery.ack()
        await publish(database_url, after)
        received = await receive(consumer, 2)
    assert [delivery.message.id for delivery in received] == [late.id, after.id]


@asynccontextmanager
async def queue_of_all_lanes(url: str) -> AsyncIterator[tuple[Queue, DeliveryLanes]]:
    """A queue that sweeps only on request, and its lanes."""
    lanes = DeliveryLanes(lambda lane: None, lambda lane: None)
    lanes.take(ALL_LANES)
    queue = Queue(
        Link(url, application_name="test"),
        lanes,
        consumer="billing",
        prefetch=100,
        sweep_interval=HOUR,
        answer_timeout=timedelta(seconds=60),
    )
    try:
        yield queue, lanes
    finally:
        await queue.close()


async def test_a_message_skipped_while_its_key_was_blocked_precedes_later_ones(
    database_url: str,
) -> None:
    late, head = (Message("orders", name, key="k") for name in (b"late", b"head"))
    lane = bucket_of(late.key, late.id)
    same_lane = next(
        f"k{n}" for n in range(1000) if bucket_of(f"k{n}", late.id) == lane
    )
    execute(database_url, "INSERT INTO inbox.subscription VALUES ('billing', 'orders')")
    async with queue_of_all_lanes(database_url) as (queue, lanes):

        async def claim() -> list[ClaimedDelivery]:
            await queue.claim(ALL_LANES)
            return queue.hand_out(100, ALL_LANES, ())

        with psycopg.connect(conninfo(database_url)) as slow:
            slow.execute(INSERT, {"id": late.id, "lane": lane, "key": late.key})
            await publish(database_url, head)
            (failed,) = await claim()
            lanes.block(failed)
            await queue.write([Settled(failed, HOUR)])
        # The floor rises above the late row, since claims skip its key.
        for _ in range(3):
            await publish(database_url, Message("orders", b"", key=same_lane))
            (row,) = await claim()
            assert row.message.key == same_lane
            await queue.write([Settled(row, None)])
        assert lanes.floors([lane])[lane] > failed.seq
        await publish(database_url, Message("orders", b"next", key="k"))
        execute(database_url, MAKE_DUE)

        queue.sweep_soon()
        rows = await claim()

    assert [row.message.id for row in rows[:2]] == [late.id, head.id]
    assert [row.message.payload for row in rows[2:]] == [b"next"]


async def test_a_refusal_after_the_lease_is_lost_blocks_no_key(
    database_url: str, proxy: MakeProxy
) -> None:
    first, *rest = numbered(3)
    lane = bucket_of(first.key, first.id)
    same_lane = next(
        f"k{n}" for n in range(1000) if bucket_of(f"k{n}", first.id) == lane
    )
    to_server, through = proxy(database_url)
    async with AsyncExitStack() as frozen, AsyncExitStack() as owning:
        late = await frozen.enter_async_context(source(through))
        await publish(
            database_url, Message("orders", b"3", key=same_lane), first, *rest
        )
        deliveries = await receive(late, 4)
        to_server.stall()
        # It reads one row at a time, and has already read that no key is blocked.
        owner = await owning.enter_async_context(source(database_url, prefetch=1))
        assert payloads(await receive(owner, 1, limit=1)) == [3]

        (refused,) = (d for d in deliveries if d.message.id == first.id)
        await refused.nack(HOUR)
        to_server.resume()
        # When it leaves, it writes any outcomes not yet written.
        await frozen.aclose()

        received = await receive(owner, 3)

    assert [int(delivery.message.payload) for delivery in received] == [0, 1, 2]
    assert execute(database_url, "TABLE inbox.redelivery") == []


async def test_replicas_share_the_lanes_and_deliver_nothing_twice(
    database_url: str,
) -> None:
    async with source(database_url) as one, source(database_url) as other:
        # Lanes move within a few heartbeats; one replica at a time has each lane.
        received: dict[PostgresSource, list[Delivery]] = {one: [], other: []}
        async with asyncio.timeout(30):
            while not received[one] or not received[other]:
                await publish(database_url, *numbered(32, keys=32))
                for replica in (one, other):
                    for delivery in await replica.receive(limit=100):
                        received[replica].append(delivery)
                        await delivery.ack()
        async with asyncio.timeout(30):
            while unacked(database_url):
                for replica in (one, other):
                    for delivery in await replica.receive(limit=100):
                        received[replica].append(delivery)
                        await delivery.ack()
    handed_out = [d.message.id for got in received.values() for d in got]
    assert len(set(handed_out)) == len(handed_out)


async def test_a_broken_connection_is_reported_and_replaced(database_url: str) -> None:
    async with source(database_url) as consumer:
        await publish(database_url, *numbered(1))
        (delivery,) = await receive(consumer, 1)
        execute(
            database_url,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name LIKE 'pillarbox inbox%%'",
        )
        await delivery.ack()
        await publish(database_url, Message("orders", b"1"))
        received: list[Delivery] = []
        async with asyncio.timeout(20):
            while not received:
                try:
                    received += await consumer.receive(limit=10)
                except BrokerUnavailableError:
                    continue
        assert payloads(received) == [1]
        await received[0].ack()
    assert unacked(database_url) == 0


async def test_rows_inserted_by_hand_are_delivered_with_their_problem(
    database_url: str,
) -> None:
    async with source(database_url) as consumer:
        execute(
            database_url,
            "INSERT INTO inbox.delivery (message_id, lane, schema_version, topic,"
            " consumer, content_type, headers, payload)"
            " SELECT gen_random_uuid(), 3, n, '', 'billing', '', h::jsonb, ''"
            "   FROM (VALUES (0, '{}'), (1, '[1]'), (1, '{\"a\": 1}')) v (n, h)",
        )
        problems = {delivery.problem for delivery in await receive(consumer, 3)}
    assert problems == {
        "schema_version is 0, must be at least 1",
        "headers is not a JSON object of strings",
    }


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda url: "redis://x", ConfigError, "use postgresql://"),
        (lambda url: "postgresql://127.0.0.1:1/x", BrokerUnavailableError, "reach"),
    ],
)
async def test_a_url_without_a_server_is_reported_at_start(
    database_url: str, change: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        async with source(change(database_url)):
            pass


async def test_a_database_without_the_inbox_is_reported_at_start(
    empty_database_url: str,
) -> None:
    with pytest.raises(ConfigError, match="run pillarbox migrate"):
        async with source(empty_database_url):
            pass
