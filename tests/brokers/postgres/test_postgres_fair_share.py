"""Tenants share a queue fairly, over the whole backlog in PostgreSQL."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from pillarbox import Consumer, Message
from pillarbox.inbox.events import MessageHandled
from pillarbox.inbox.source import Delivery
from pillarbox.inbox.sources.postgres import PostgresSource
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import add_reader, list_readers
from pillarbox.outbox.administration.tenants import add_tenant_index, drop_tenant_index
from pillarbox.outbox.lane import Priority, lanes_of
from tests.fixtures.consumers import async_sessions_of, running
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute
from tests.fixtures.urls import with_options

FLOOD = """
    INSERT INTO outbox.message
           (id, lane, schema_version, topic, key, tenant,
            content_type, headers, payload)
    SELECT outbox.uuid7(), {lane} + n %% {lanes}, 1, 'orders',
           concat_ws(' ', %s::text, n %% 640), %s,
           'text/plain', '{{}}', convert_to(n::text, 'UTF8')
      FROM generate_series(1, %s) AS n
"""
IN_MEMORY = 1000
AHEAD = "SELECT count(*) FROM outbox.deferral WHERE cause = 'settled'"
WAITING = "SELECT count(*) FROM outbox.unsettled_message WHERE reader = 'billing'"
OF_THE_GATE = """
    SELECT count(*) FROM outbox.partitions('outbox.message') AS p
     CROSS JOIN LATERAL outbox.unsettled_messages(p.partition, p.starts_at, p.ends_at, 5000) AS m
     WHERE m.reader = 'billing'
"""  # noqa: E501
REPLAY = """
    INSERT INTO outbox.deferral (created_at, due_at, seq, id, run, lane, cause, reader, key)
    SELECT created_at, clock_timestamp(), seq, id, run + 1, lane, 'replayed', reader, key
      FROM outbox.message_status
     WHERE state = 'handled' AND reader = 'billing'
     ORDER BY seq DESC
     LIMIT 1
"""  # noqa: E501
COUNTED = """
    SELECT sum(messages)::integer,
           (sum(messages - deferred)
            + (SELECT count(*) FROM outbox.deferral WHERE cause = 'settled'))::integer
      FROM outbox.position WHERE reader = 'billing'
"""


class Backlog:
    """The messages of a consumer in the outbox, which has the index by tenant."""

    left = (
        "SELECT count(*) FROM outbox.message_status"
        " WHERE reader = 'billing' AND state <> 'handled'"
    )

    def __init__(self, database_url: str) -> None:
        self.database_url = database_url
        with administration(database_url, application_name="test") as connection:
            add_reader(
                connection, "billing", ["orders"], for_consumer=True, from_oldest=True
            )
            add_tenant_index(connection)

    def flood(
        self, count: int, tenant: str | None = "flood", *, lanes: int = 16
    ) -> None:
        flood = FLOOD.format(lane=lanes_of(Priority.DEFAULT)[0], lanes=lanes)
        execute(self.database_url, flood, (tenant, tenant, count))
        execute(self.database_url, "ANALYZE outbox.message")

    def add(self, *messages: Message) -> None:
        insert(self.database_url, *messages)

    def source(self, **options: object) -> PostgresSource:
        return PostgresSource(
            with_options(self.database_url, **options),
            consumer="billing",
            topics=["orders"],
        )


@pytest.fixture
def queue(database_url: str) -> Backlog:
    return Backlog(database_url)


@pytest.fixture
async def sessions(
    database_url: str,
) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    async with async_sessions_of(database_url) as made:
        yield made


async def take(source: PostgresSource, least: int, queue: Backlog) -> list[Delivery]:
    """Receive as a consumer does whose handlers use the database; ack everything."""
    taken: list[Delivery] = []
    while len(taken) < least:
        for delivery in await source.receive(limit=16):
            # It is as slow as the searches are.
            await asyncio.to_thread(execute, queue.database_url, "SELECT 1")
            taken.append(delivery)
            await delivery.ack()
    return taken


async def receive(
    source: PostgresSource, tenant: str, queue: Backlog
) -> list[Delivery]:
    """Receive until there are messages of a tenant; leave all others unsettled."""
    async with asyncio.timeout(60):
        while True:
            taken = await source.receive(limit=64)
            if found := [d for d in taken if d.message.tenant == tenant]:
                return found
            await asyncio.to_thread(execute, queue.database_url, "SELECT 1")


def positions(taken: list[Delivery], tenant: str) -> list[int]:
    return [n for n, d in enumerate(taken) if d.message.tenant == tenant]


async def test_another_tenants_message_is_among_the_first_despite_a_flood(
    queue: Backlog,
) -> None:
    queue.flood(20_000)
    queue.add(Message("orders", b"", key="k", tenant="other"))
    async with queue.source() as source:
        taken = await take(source, 512, queue)
    # The first claim is handed out while tenants are searched.
    assert positions(taken, "other")[0] <= 256


async def test_a_message_published_during_a_flood_is_delivered_soon(
    queue: Backlog,
) -> None:
    queue.flood(20_000)
    async with queue.source() as source:
        await take(source, 500, queue)
        queue.add(Message("orders", b"", key="k", tenant="other"))
        taken = await take(source, IN_MEMORY, queue)
    assert len(positions(taken, "other")) == 1


async def test_two_floods_get_equal_shares_in_order(
    queue: Backlog,
) -> None:
    queue.flood(3_000)
    queue.flood(3_000, tenant="also a flood")
    async with queue.source() as source:
        taken = await take(source, 2_000, queue)
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


async def test_many_tenants_all_get_their_turn(queue: Backlog) -> None:
    queue.flood(5_000)
    few = [
        Message("orders", b"", key=f"key {n}", tenant=f"tenant {n:03}")
        for n in range(200)
    ]
    queue.add(*few)
    async with queue.source() as source:
        taken = await take(source, IN_MEMORY, queue)
    assert len({d.message.tenant for d in taken}) == 201


@pytest.mark.long
async def test_each_message_is_delivered_once_in_any_order(
    queue: Backlog,
) -> None:
    queue.flood(3_000)
    queue.flood(700, tenant="b")
    queue.flood(300, tenant=None)
    async with queue.source(prefetch=64) as source:
        taken = await take(source, 4_000, queue)
        assert await source.receive(limit=64) == []
    assert len({d.message.id for d in taken}) == len(taken) == 4_000
    assert execute(
        queue.database_url,
        queue.left,
    ) == [(0,)]


async def test_a_failure_of_a_hidden_tenant_blocks_only_its_key(
    queue: Backlog,
) -> None:
    queue.flood(2_000)
    first, second, other = (
        Message("orders", b"", key=key, tenant="other") for key in ("k", "k", "l")
    )
    queue.add(first)
    async with queue.source() as source:
        (found,) = await receive(source, "other", queue)
        await found.nack(timedelta(hours=1))
        queue.add(second, other)
        taken = await take(source, IN_MEMORY, queue)
    assert [d.message.id for d in taken if d.message.tenant == "other"] == [other.id]


@pytest.mark.long
async def test_a_tenant_at_its_limit_does_not_delay_others(
    queue: Backlog, sessions: async_sessionmaker[AsyncSession]
) -> None:
    queue.flood(3_000)
    at_work: Counter[str | None] = Counter()
    most: Counter[str | None] = Counter()
    gate = asyncio.Event()
    consumer = Consumer(
        queue.database_url,
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
        queue.add(*others)
        # The flood's handlers wait, and use all of its slots.
        await events.wait_for(MessageHandled, 30)
        assert at_work["flood"] == 2
        gate.set()
        await events.wait_for(MessageHandled, 300)
    assert max(most.values()) == 2


async def test_without_the_index_claims_read_the_flood_first(
    database_url: str,
) -> None:
    queue = Backlog(database_url)
    with administration(database_url, application_name="test") as connection:
        drop_tenant_index(connection)
    queue.flood(2_000)
    queue.add(Message("orders", b"", key="k", tenant="other"))
    async with queue.source() as source:
        taken = await take(source, 2_001, queue)
    assert positions(taken, "other")[0] > 1_000


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "in between"])
async def test_a_message_that_commits_late_is_overtaken_by_none_of_its_key(
    database_url: str, *, is_first: bool
) -> None:
    queue = Backlog(database_url)
    add = "SELECT outbox.add('orders', %s, key => 'k', tenant => 'other')"
    others = [Message("orders", b"", key=f"{n}", tenant="other") for n in range(64)]
    with psycopg.connect(database_url) as late:
        if not is_first:
            queue.flood(2_000)
        late.execute(add, (b"1",))
        if is_first:
            queue.flood(2_000)
        queue.add(*others)
        async with queue.source(prefetch=32) as source:
            before = await take(source, 600, queue)
            assert len(positions(before, "other")) == len(others)
            late.commit()
            execute(database_url, add, (b"2",))
            taken = await take(source, 2_066 - len(before), queue)
    payloads = [d.message.payload for d in taken if d.message.key == "k"]
    assert payloads == [b"1", b"2"]


async def test_what_was_handled_ahead_is_settled_for_whoever_comes_next(
    database_url: str,
) -> None:
    queue = Backlog(database_url)
    queue.flood(600, lanes=1)
    queue.flood(600, tenant="also a flood", lanes=1)
    async with queue.source() as source:
        before = await take(source, 500, queue)
    left = 1_200 - len(before)
    ((ahead,),) = execute(database_url, AHEAD)
    assert ahead > 100
    for statement in (WAITING, OF_THE_GATE):
        assert execute(database_url, statement) == [(left,)]
    with administration(database_url, application_name="test") as connection:
        (listed,) = list_readers(connection, "billing")
    assert listed.messages == left

    ((replayed,),) = execute(database_url, f"{REPLAY} RETURNING id")
    async with queue.source() as source:
        after = await take(source, left + 1, queue)
    times = Counter(d.message.id for d in (*before, *after))
    assert len(times) == 1_200
    assert {id for id in times if times[id] > 1} == {replayed}
    for statement in (WAITING, OF_THE_GATE):
        assert execute(database_url, statement) == [(0,)]
    # A replay is one more.
    assert execute(database_url, COUNTED) == [(1_200, 1_201)]
