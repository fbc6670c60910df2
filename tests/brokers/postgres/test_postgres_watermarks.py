"""The state that the next replica finds: marks, the log, watermarks and held days."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from inbox.sources.postgres.lanes import ClaimedDelivery, DeliveryLanes
from inbox.sources.postgres.queue import Queue, Settled
from outbox import Message, uuid7
from outbox.lane import bucket_of
from outbox.postgres.connection import Link, conninfo
from relay.publishers.postgres import PostgresPublisher
from tests.fixtures.consumers import numbered
from tests.fixtures.days import make_partitions_at
from tests.fixtures.sessions import execute

PAGE = Path(__file__).parents[3] / "docs/brokers/postgres.md"
HOUR = timedelta(hours=1)
AT_ONCE = timedelta(0)
ALL = range(16)
SUBSCRIBE = (
    "INSERT INTO inbox.subscription VALUES ('billing', 'orders') ON CONFLICT DO NOTHING"
)
WRITES = """
    SELECT sum(n_tup_upd), sum(n_tup_del) FROM pg_stat_user_tables
     WHERE schemaname = 'inbox' AND relname ~ '^(delivery|ack|redelivery|watermark)_p'
"""
VERIFIED = "SELECT coalesce(sum(deliveries), 0)::int FROM inbox.watermark"
UNSETTLED = """
    SELECT count(*)
      FROM outbox.partitions('inbox.delivery') AS p
     CROSS JOIN LATERAL inbox.unsettled_deliveries(p.partition, p.starts_at, p.ends_at)
"""
BY_HAND = """
    INSERT INTO inbox.delivery (seq, message_id, lane, schema_version, consumer, topic,
                                content_type, headers, payload)
    VALUES (%s, %s, %s, 1, 'billing', 'orders', 'text/plain', '{}', 'by hand')
"""


class Replica:
    """A replica that holds all lanes, and acts only on request."""

    def __init__(self, queue: Queue, lanes: DeliveryLanes) -> None:
        self.queue = queue
        self.lanes = lanes

    async def claim(self) -> list[ClaimedDelivery]:
        await self.queue.claim(ALL)
        return self.queue.hand_out(1000, ALL, ())

    async def sweep(self) -> list[ClaimedDelivery]:
        self.queue.sweep_soon()
        rows = await self.claim()
        while self.queue.is_verifying:
            rows += await self.claim()
        return rows

    async def ack(self, *rows: ClaimedDelivery) -> None:
        await self.queue.write([Settled(row, None) for row in rows])

    async def refuse(self, row: ClaimedDelivery, delay: timedelta = HOUR) -> None:
        self.lanes.block(row)
        await self.queue.write([Settled(row, delay)])

    async def leave(self) -> None:
        await self.queue.raise_watermarks(ALL)


@asynccontextmanager
async def replica(
    url: str, *, verify_interval: timedelta = HOUR, prefetch: int = 100
) -> AsyncIterator[Replica]:
    """Take all lanes; leaving the block is as sudden as a kill."""
    execute(url, SUBSCRIBE)
    lanes = DeliveryLanes(lambda lane: None, lambda lane: None)
    lanes.take(ALL)
    queue = Queue(
        Link(url, application_name="test"),
        lanes,
        consumer="billing",
        prefetch=prefetch,
        sweep_interval=HOUR,
        answer_timeout=timedelta(seconds=60),
        verify_interval=verify_interval,
    )
    try:
        yield Replica(queue, lanes)
    finally:
        await queue.close()


async def publish(url: str, *messages: Message) -> None:
    async with PostgresPublisher.from_url(url) as publisher:
        await publisher.publish(messages)


def numbers(rows: Sequence[ClaimedDelivery]) -> list[int]:
    return [int(row.message.payload) for row in rows]


def one(url: str, query: str) -> Any:
    ((value,),) = execute(url, query)
    return value


async def test_nothing_is_ever_updated_or_deleted(database_url: str) -> None:
    async with replica(database_url) as working:
        await publish(database_url, *numbered(50, keys=10))
        rows = await working.claim()
        await working.refuse(rows[0], AT_ONCE)
        await working.ack(*rows[1:])
        await working.ack(*await working.claim())
        await working.leave()
    execute(database_url, "SELECT pg_stat_force_next_flush()")
    assert execute(database_url, WRITES) == [(0, 0)]
    assert one(database_url, "SELECT count(*) FROM inbox.ack") < 50


async def test_the_next_owner_finds_only_unacked_deliveries(
    database_url: str,
) -> None:
    async with replica(database_url) as killed:
        await publish(database_url, *numbered(20, keys=20))
        rows = await killed.claim()
        await killed.ack(*rows[:15])
    async with replica(database_url) as next_owner:
        again = await next_owner.claim()
    assert sorted(numbers(again)) == sorted(numbers(rows[15:]))


async def test_a_watermark_saves_the_next_owner_from_reading_settled_deliveries(
    database_url: str,
) -> None:
    async with replica(database_url) as leaving:
        await publish(database_url, *numbered(30, keys=30))
        await leaving.ack(*await leaving.claim())
        await leaving.leave()
    assert one(database_url, VERIFIED) == 30
    async with replica(database_url) as next_owner:
        assert await next_owner.claim() == []
        floors = next_owner.lanes.floors(ALL)
        assert next_owner.lanes.passed(ALL) == []
    heads = execute(
        database_url, "SELECT lane, max(seq) FROM inbox.delivery GROUP BY lane"
    )
    assert {lane: floors[lane] for lane, _ in heads} == dict(heads)


async def test_a_new_owner_verifies_stretches_that_nobody_has_verified(
    database_url: str,
) -> None:
    async with replica(database_url) as killed:
        await publish(database_url, *numbered(30, keys=30))
        await killed.ack(*await killed.claim())
    assert one(database_url, VERIFIED) == 0
    async with replica(database_url) as next_owner:
        assert await next_owner.claim() == []
    assert one(database_url, VERIFIED) == 30
    async with replica(database_url) as another:
        assert await another.claim() == []
    assert one(database_url, VERIFIED) == 30


async def test_a_watermark_waits_for_open_transactions(database_url: str) -> None:
    late = Message("orders", b"99", key="late")
    insert = BY_HAND.replace("seq, ", "", 1).replace("(%s, ", "(", 1)
    async with replica(database_url) as killed:
        with psycopg.connect(conninfo(database_url)) as slow:
            lane = bucket_of(late.key, late.id)
            slow.execute(insert.replace("by hand", "99"), (late.id, lane))
            await publish(database_url, *numbered(30, keys=30))
            await killed.ack(*await killed.claim())
            async with replica(database_url) as next_owner:
                assert await next_owner.claim() == []
                assert one(database_url, VERIFIED) == 0
                slow.commit()
                assert numbers(await next_owner.claim()) == [99]


async def test_deliveries_waiting_for_their_key_come_in_order_after_a_kill(
    database_url: str,
) -> None:
    async with replica(database_url) as killed:
        await publish(database_url, *numbered(3))
        head, *_ = await killed.claim()
        await killed.refuse(head, AT_ONCE)
        # The deliveries claimed behind it are not logged yet.
    async with replica(database_url) as next_owner:
        rows = await next_owner.claim()
        assert numbers(rows) == [0, 1, 2]
        assert [row.attempts for row in rows] == [1, 0, 0]


@pytest.mark.parametrize("acked", [0, 1, 2])
async def test_a_kill_while_a_key_drains_loses_nothing_and_keeps_the_order(
    database_url: str, acked: int
) -> None:
    async with replica(database_url) as killed:
        await publish(database_url, *numbered(4))
        head, *_ = await killed.claim()
        await killed.refuse(head)
        await killed.claim()  # logs the deliveries behind it
    execute(
        database_url,
        "INSERT INTO inbox.redelivery (created_at, due_at, seq, attempts, lane, cause,"
        " consumer, key) SELECT created_at, now(), seq, attempts, lane, cause,"
        " consumer, key FROM inbox.redelivery WHERE cause = 'refused'",
    )
    async with replica(database_url) as draining:
        rows = await draining.claim()
        assert numbers(rows) == [0, 1, 2, 3]
        await draining.ack(*rows[:acked])
    async with replica(database_url) as next_owner:
        await publish(database_url, Message("orders", b"4", key=rows[0].message.key))
        rows = await next_owner.claim()
        assert numbers(rows) == [0, 1, 2, 3, 4][acked:]
        await next_owner.ack(*rows)
    assert one(database_url, UNSETTLED) == 0


async def test_a_blocked_key_can_have_more_deliveries_than_one_claim(
    database_url: str,
) -> None:
    async with replica(database_url, prefetch=10) as working:
        await publish(database_url, *numbered(1))
        (head,) = await working.claim()
        await working.refuse(head, timedelta(milliseconds=1))
        working.lanes.block(head)  # not due until `refused` is called
        await publish(database_url, *numbered(35)[1:], Message("orders", b"35"))
        assert numbers(await working.claim()) == [35]
        working.lanes.refused(head, 0.0)
        drained: list[int] = []
        while rows := await working.claim():
            drained += numbers(rows)
            await working.ack(*rows)
    assert drained == [*range(35)]
    assert one(database_url, UNSETTLED) == 1  # the message without a key


async def test_a_delivery_handled_for_long_does_not_hold_back_a_watermark(
    database_url: str,
) -> None:
    async with replica(database_url, verify_interval=AT_ONCE) as working:
        await publish(database_url, *numbered(30, keys=3))
        at_work, *rest = await working.claim()
        await working.ack(*rest)
        await working.sweep()
        assert await working.sweep() == []
        assert one(database_url, VERIFIED) == 30
        async with replica(database_url) as next_owner:
            assert await next_owner.claim() == [
                at_work._replace(is_logged=True),
            ]
        await working.ack(at_work)
        assert one(database_url, UNSETTLED) == 0
    async with replica(database_url) as another:
        assert await another.claim() == []


async def test_a_row_inserted_by_hand_below_a_watermark_is_found(
    database_url: str,
) -> None:
    async with replica(database_url, verify_interval=AT_ONCE) as working:
        await publish(database_url, *numbered(64, keys=64))
        await working.ack(*await working.claim())
        await working.sweep()
        await working.sweep()
        assert one(database_url, VERIFIED) == 64
        execute(database_url, "SELECT nextval('inbox.delivery_seq')")
        (lane,) = next(
            row
            for row in execute(
                database_url, "SELECT lane FROM inbox.watermark ORDER BY up_to DESC"
            )
        )
        execute(database_url, BY_HAND, (0, uuid7(), lane))
        assert one(database_url, UNSETTLED) == 1
        found: list[ClaimedDelivery] = []
        for _ in ALL:  # each sweep checks one lane
            found += await working.sweep()
        (row,) = found
        assert row.message.payload == b"by hand"
        await working.ack(row)
    assert one(database_url, UNSETTLED) == 0
    async with replica(database_url) as next_owner:
        assert await next_owner.claim() == []


async def test_resetting_the_sequence_loses_nothing(database_url: str) -> None:
    async with replica(database_url, verify_interval=AT_ONCE) as working:
        await publish(database_url, *numbered(32, keys=32))
        await working.ack(*await working.claim())
        await working.sweep()
        await working.sweep()
        execute(database_url, "SELECT setval('inbox.delivery_seq', 1, false)")
        await publish(database_url, *numbered(16, keys=16))
        # They have the same numbers and lanes as the acked deliveries.
        assert one(database_url, UNSETTLED) == 16
        rows = await working.sweep()
        rows += await working.claim()
        assert sorted(numbers(rows)) == [*range(16)]
        await working.ack(*rows)
    assert one(database_url, UNSETTLED) == 0


async def test_a_mark_does_not_apply_to_another_delivery_with_its_number(
    database_url: str,
) -> None:
    async with replica(database_url) as working:
        await publish(database_url, *numbered(1))
        (row,) = await working.claim()
        await working.ack(row)
    execute(database_url, BY_HAND, (row.seq, uuid7(), row.lane))
    status = "SELECT state FROM inbox.delivery_status ORDER BY created_at"
    assert execute(database_url, status) == [("acked",), ("ready",)]
    assert one(database_url, UNSETTLED) == 1


async def test_unsettled_deliveries_are_shown_even_without_a_subscription(
    database_url: str,
) -> None:
    execute(database_url, "INSERT INTO inbox.subscription VALUES ('audit', 'orders')")
    async with replica(database_url) as working:
        await publish(database_url, *numbered(10, keys=10))
        first, second, *rest = await working.claim()
        await working.ack(*rest)
        await working.refuse(first)
    execute(database_url, "DELETE FROM inbox.subscription")
    states = execute(
        database_url,
        "SELECT consumer, state, count(*) FROM inbox.unsettled_delivery"
        " GROUP BY consumer, state ORDER BY 1, 2",
    )
    assert second.lane in ALL
    assert states == [
        ("audit", "ready", 10),
        ("billing", "ready", 1),
        ("billing", "waiting", 1),
    ]
    assert one(database_url, UNSETTLED) == 12

    documented = PAGE.read_text().partition("```sql\n")[2].partition("```")[0]
    for consumer, left in (("billing", 10), ("audit", 0)):
        with psycopg.connect(conninfo(database_url), autocommit=True) as dba:
            dba.execute("SET ROLE pillarbox_consumer")
            dba.execute(documented.replace("billing", consumer).encode())
        assert one(database_url, UNSETTLED) == left
        unsettled = "SELECT count(*) FROM inbox.unsettled_delivery"
        assert one(database_url, unsettled) == left


@pytest.mark.parametrize("verified", [True, False])
async def test_a_day_is_dropped_with_its_marks_once_everything_is_acked(
    database_url: str, verified: bool
) -> None:
    at = datetime.now(UTC).replace(hour=12, minute=1) - timedelta(days=40)
    owner = f"{database_url}?options=-crole%3Dpillarbox_owner"
    execute(owner, make_partitions_at("inbox.delivery").decode(), [[at]])
    execute(
        database_url,
        "INSERT INTO inbox.delivery (created_at, message_id, lane, schema_version,"
        " consumer, topic, key, content_type, headers, payload)"
        " SELECT %s + n * interval '1 second', outbox.uuid7(), n %% 16, 1, 'billing',"
        " 'orders', 'k' || n, 'text/plain', '{}', convert_to(n::text, 'UTF8')"
        " FROM generate_series(1, 40) AS n",
        [at],
    )
    partitions = (
        "SELECT count(*) FROM pg_inherits WHERE inhparent::regclass::text ~ '^inbox"
        "[.](delivery|ack|redelivery|watermark)$' AND inhrelid::regclass::text ~"
        f" '{at:%Y_?%m_?%d}'"
    )
    async with replica(database_url) as working:
        rows = await working.claim()
        assert len(rows) == 40
        waiting, *rest = rows
        await working.ack(*rest)
        await working.refuse(waiting, AT_ONCE)
        execute(database_url, "CALL outbox.maintain()")
        assert one(database_url, partitions) == 4
        await working.ack(*await working.claim())
        if verified:
            await working.leave()
    assert one(database_url, VERIFIED) == (40 if verified else 0)
    execute(database_url, "CALL outbox.maintain()")
    assert one(database_url, partitions) == 0
