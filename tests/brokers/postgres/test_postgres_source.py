"""Rows that commit late, and refusals that come too late, keep the order of keys."""

from contextlib import AsyncExitStack, suppress
from datetime import timedelta

import psycopg
import pytest

from pillarbox import Message, uuid7
from pillarbox.inbox.sources.postgres import PostgresSource
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox.outbox.lane import Priority, lane_of
from pillarbox.outbox.postgres.connection import conninfo
from tests.fixtures.consumers import numbered
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.readers import add_consumer
from tests.fixtures.relay import insert, make_due
from tests.fixtures.replicas import replica
from tests.fixtures.sessions import execute
from tests.fixtures.sources import payloads, receive
from tests.fixtures.urls import with_options

HOUR = timedelta(hours=1)
ADD = "SELECT outbox.add('orders', '0'::jsonb, key => %s)"


def source(url: str, **options: object) -> PostgresSource:
    return PostgresSource(
        with_options(url, **{"lease": timedelta(seconds=2), **options}),
        consumer="billing",
        topics=["orders"],
        poll_interval=timedelta(milliseconds=100),
    )


def same_lane_as(key: str) -> str:
    lane = lane_of(key, uuid7(), Priority.DEFAULT)
    others = (f"k{n}" for n in range(1000))
    return next(it for it in others if lane_of(it, uuid7(), Priority.DEFAULT) == lane)


@pytest.mark.parametrize("began", ["earlier", "later"])
async def test_a_message_that_commits_late_is_not_overtaken(
    began: str, database_url: str
) -> None:
    add_consumer(database_url, "billing", "orders")
    url = conninfo(database_url)
    async with source(database_url) as consumer:
        with psycopg.connect(url) as slow, psycopg.connect(url) as quick:
            if began == "earlier":
                # Its id is lower: the snapshot after its commit ends below the late id.
                quick.execute("SELECT pg_current_xact_id()")
            slow.execute(ADD, ["late"])
            for _ in range(3):
                quick.execute(ADD, [same_lane_as("late")])
                quick.commit()
                (delivery,) = await receive(consumer, 1)
                assert delivery.message.key == same_lane_as("late")
                await delivery.ack()
        insert(database_url, Message("orders", b"1", key="late"))
        received = await receive(consumer, 2)
    assert [delivery.message.key for delivery in received] == ["late", "late"]
    assert payloads(received) == [0, 1]


async def test_a_message_skipped_while_its_key_was_blocked_precedes_later_ones(
    database_url: str,
) -> None:
    async with replica(database_url) as working:
        with psycopg.connect(conninfo(database_url)) as slow:
            slow.execute(ADD, ["k"])
            insert(database_url, Message("orders", b"1", key="k"))
            (failed,) = await working.claim()
            await working.refuse(failed)
        # The position advances beyond the late row, since claims skip its key.
        for _ in range(3):
            insert(database_url, Message("orders", b"9", key=same_lane_as("k")))
            (row,) = await working.claim()
            assert row.message.key == same_lane_as("k")
            await working.ack(row)
        insert(database_url, Message("orders", b"2", key="k"))
        make_due(database_url)
        handled: list[int] = []
        while len(handled) < 3:
            rows = await working.sweep()
            handled += [int(row.message.payload) for row in rows]
            await working.ack(*rows)
    assert handled == [0, 1, 2]


async def test_a_refusal_after_the_lease_is_lost_blocks_no_key(
    database_url: str, proxy: MakeProxy
) -> None:
    add_consumer(database_url, "billing", "orders")
    first, *rest = numbered(3)
    assert first.key is not None
    to_server, through = proxy(database_url)
    async with AsyncExitStack() as frozen:
        late = await frozen.enter_async_context(source(through))
        other = Message("orders", b"3", key=same_lane_as(first.key))
        insert(database_url, other, first, *rest)
        deliveries = await receive(late, 4)
        to_server.stall()
        # It has already read that no key is blocked.
        async with source(database_url, prefetch=1) as owner:
            assert payloads(await receive(owner, 1, limit=1)) == [3]

            (refused,) = (d for d in deliveries if d.message.id == first.id)
            await refused.nack(HOUR)
            to_server.resume()
            # When it leaves, it writes any outcomes not yet written.
            with suppress(BrokerUnavailableError):
                await frozen.aclose()

            received = await receive(owner, 3)
            assert payloads(received) == [0, 1, 2]
            refusals = "SELECT 1 FROM outbox.deferral WHERE cause = 'refused'"
            assert execute(database_url, refusals) == []


async def test_a_database_without_the_outbox_is_reported_at_start(
    empty_database_url: str,
) -> None:
    with pytest.raises(ConfigError, match="run pillarbox migrate"):
        async with source(empty_database_url):
            pass
