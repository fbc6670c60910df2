"""The postgres source: a consumer's deliveries, shared by its replicas, in order."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta

import psycopg
import pytest

from inbox.sources.postgres import InboxSource
from inbox.sources.postgres.inbox_source import SESSION_SETTINGS
from inbox.sources.postgres.lanes import ClaimedDelivery, DeliveryLanes
from inbox.sources.postgres.queue import Outcome, Queue
from outbox.errors import ConfigError
from outbox.lane import bucket_of
from outbox.postgres.connection import Link, conninfo
from pillarbox import Message, uuid7
from tests.fixtures.consumers import numbered
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.sessions import execute
from tests.fixtures.sources import payloads, receive
from tests.fixtures.sources import publish_copy as publish
from tests.fixtures.urls import with_options

HOUR = timedelta(hours=1)
ALL_LANES = range(16)
MAKE_DUE = """
    INSERT INTO inbox.deferral (created_at, seq, attempts, lane, cause, consumer, key,
                                  due_at)
    SELECT created_at, seq, attempts, lane, 'refused', consumer, key, now()
      FROM inbox.delivery_status
     WHERE attempts = 1 AND acked_at IS NULL
"""
INSERT = """
    INSERT INTO inbox.message (message_id, lane, schema_version, topic, key,
                               content_type, headers, payload)
    VALUES (%(id)s, %(lane)s, 1, 'orders', %(key)s, 'text/plain', '{}', '0')
"""


@asynccontextmanager
async def source(
    url: str,
    *,
    sweep_interval: timedelta = timedelta(milliseconds=200),
    **options: object,
) -> AsyncIterator[InboxSource]:
    options = {"lease": timedelta(seconds=2), **options}
    async with InboxSource(
        with_options(url, **options),
        consumer="billing",
        topics=["orders*"],
        poll_interval=timedelta(milliseconds=100),
        sweep_interval=sweep_interval,
    ) as entered:
        yield entered


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
        Link(url, application_name="test", settings=SESSION_SETTINGS),
        lanes,
        consumer="billing",
        prefetch=100,
        sweep_interval=HOUR,
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
            await queue.write([Outcome(failed, HOUR)])
        # The position advances beyond the late row, since claims skip its key.
        for _ in range(3):
            await publish(database_url, Message("orders", b"", key=same_lane))
            (row,) = await claim()
            assert row.message.key == same_lane
            await queue.write([Outcome(row, None)])
        assert (found := lanes.find(lane)) is not None
        assert found.up_to > failed.seq
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

    assert payloads(received) == [0, 1, 2]
    assert execute(database_url, "TABLE inbox.deferral") == []


async def test_rows_inserted_by_hand_are_delivered_with_their_problem(
    database_url: str,
) -> None:
    async with source(database_url) as consumer:
        execute(
            database_url,
            "INSERT INTO inbox.message (message_id, lane, schema_version, topic,"
            " content_type, headers, payload)"
            " SELECT gen_random_uuid(), 3, n, 'orders', '', h::jsonb, ''"
            "   FROM (VALUES (0, '{}'), (1, '[1]'), (1, '{\"a\": 1}')) v (n, h)",
        )
        problems = {delivery.problem for delivery in await receive(consumer, 3)}
    assert problems == {
        "schema_version is 0, must be at least 1",
        "headers is not a JSON object of strings",
    }


async def test_a_database_without_the_inbox_is_reported_at_start(
    empty_database_url: str,
) -> None:
    with pytest.raises(ConfigError, match="run pillarbox migrate"):
        async with source(empty_database_url):
            pass
