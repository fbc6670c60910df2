"""The state that the next replica finds: positions, the log and held days."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from inbox.sources.postgres.inbox_source import SESSION_SETTINGS
from inbox.sources.postgres.lanes import ClaimedDelivery, DeliveryLanes
from inbox.sources.postgres.queue import AWAY, Outcome, Queue
from outbox.administration.migrate import migrate
from outbox.lane import bucket_of
from outbox.postgres.connection import Link, conninfo
from outbox.testing.postgres import PostgresServer
from pillarbox import BrokerUnavailableError, ConfigError, Message, uuid7
from tests.fixtures.consumers import numbered
from tests.fixtures.days import make_partitions_at
from tests.fixtures.deliveries import count_holding
from tests.fixtures.sessions import execute
from tests.fixtures.sources import publish_copy as publish
from tests.fixtures.upkeep import run_upkeep

HOUR = timedelta(hours=1)
AT_ONCE = timedelta(0)
ALL = range(16)
SUBSCRIBE = (
    "INSERT INTO inbox.subscription VALUES ('billing', 'orders') ON CONFLICT DO NOTHING"
)
WRITES = """
    SELECT sum(n_tup_upd), sum(n_tup_del) FROM pg_stat_user_tables
     WHERE schemaname = 'inbox' AND relname ~ '^(message|position|deferral)_p'
"""
COVERED = "SELECT coalesce(sum(messages), 0)::int FROM inbox.position"
BY_HAND = """
    INSERT INTO inbox.message (seq, message_id, lane, schema_version, topic,
                               content_type, headers, payload)
    VALUES (%s, %s, %s, 1, 'orders', 'text/plain', '{}', 'by hand')
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
        return await self.claim()

    async def ack(self, *rows: ClaimedDelivery) -> None:
        await self.queue.write([Outcome(row, None) for row in rows])

    async def refuse(self, row: ClaimedDelivery, delay: timedelta = HOUR) -> None:
        self.lanes.block(row)
        await self.queue.write([Outcome(row, delay)])

    async def leave(self) -> None:
        await self.queue.leave(ALL)


@asynccontextmanager
async def replica(
    url: str, *, open_after: timedelta = HOUR, prefetch: int = 100
) -> AsyncIterator[Replica]:
    """Take all lanes; leaving the block is as sudden as a kill."""
    execute(url, SUBSCRIBE)
    lanes = DeliveryLanes(lambda lane: None, lambda lane: None)
    lanes.take(ALL)
    queue = Queue(
        Link(url, application_name="test", settings=SESSION_SETTINGS),
        lanes,
        consumer="billing",
        prefetch=prefetch,
        sweep_interval=HOUR,
        open_after=open_after,
    )
    try:
        yield Replica(queue, lanes)
    finally:
        await queue.close()


def numbers(rows: Sequence[ClaimedDelivery]) -> list[int]:
    return [int(row.message.payload) for row in rows]


def make_due(url: str) -> None:
    """Let the delays of all nacked deliveries end."""
    execute(
        url,
        "INSERT INTO inbox.deferral (created_at, due_at, seq, attempts, lane, cause,"
        " consumer, key) SELECT created_at, now(), seq, attempts, lane, cause,"
        " consumer, key FROM inbox.deferral WHERE cause = 'refused'",
    )


def end_session(url: str) -> None:
    execute(
        url,
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
        " WHERE application_name = 'test' AND datname = current_database()",
    )


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
    assert one(database_url, COVERED) == 50
    assert one(database_url, "SELECT count(*) FROM inbox.position") < 49


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


async def test_a_killed_replica_gets_at_most_256_acked_deliveries_again(
    database_url: str,
) -> None:
    async with replica(database_url, prefetch=1000) as killed:
        await publish(
            database_url, *(Message("orders", b"0", key="k") for _ in range(400))
        )
        first, *rest = await killed.claim()
        for row in rest:
            await killed.ack(row)
    assert one(database_url, "SELECT cause FROM inbox.deferral") == "open"
    async with replica(database_url, prefetch=1000) as next_owner:
        again = await next_owner.claim()
    assert again[0].place == first.place
    assert len(again) <= 257


async def test_a_replica_that_leaves_hands_over_only_what_is_not_acked(
    database_url: str,
) -> None:
    async with replica(database_url) as leaving:
        await publish(database_url, *numbered(30, keys=3))
        in_hand, *rest = await leaving.claim()
        await leaving.ack(*rest)
        await leaving.leave()
    async with replica(database_url) as next_owner:
        (row,) = await next_owner.claim()
        assert row.place == in_hand.place
        await next_owner.ack(row)
    assert count_holding(database_url) == 0


async def test_a_message_of_an_open_transaction_is_claimed_after_its_commit(
    database_url: str,
) -> None:
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
                slow.commit()
                assert count_holding(database_url) == 1
                assert numbers(await next_owner.claim()) == [99]


async def test_a_topic_subscribed_later_brings_no_older_messages(
    database_url: str,
) -> None:
    execute(database_url, "INSERT INTO inbox.subscription VALUES ('audit', '*')")
    async with replica(database_url) as working:
        old = [Message("refunds", b"0", key=str(n)) for n in range(20)]
        await publish(database_url, *old, *numbered(20, keys=20))
        execute(
            database_url, "INSERT INTO inbox.subscription VALUES ('billing', 'ref*')"
        )
        new = [Message("refunds", b"0", key=str(n)) for n in range(20)]
        await publish(database_url, *new)
        rows = await working.claim()
        await working.ack(*rows)
    ids = {row.message.id for row in rows if row.message.topic == "refunds"}
    assert ids == {message.id for message in new}
    assert len(rows) == 40
    execute(database_url, "DELETE FROM inbox.subscription WHERE consumer = 'audit'")
    assert count_holding(database_url) == 0


async def test_a_claim_bounds_the_rows_that_it_reads(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inbox.sources.postgres.queue.MAX_READ", 10)
    execute(database_url, "INSERT INTO inbox.subscription VALUES ('audit', '*')")
    async with replica(database_url) as working:
        await publish(
            database_url,
            *(Message("other", b"0", key="k") for _ in range(95)),
            Message("orders", b"1", key="k"),
            *(Message("other", b"0", key="k") for _ in range(95)),
        )
        rows = await working.claim()
        assert numbers(rows) == [1]
        await working.ack(*rows)
        assert await working.claim() == []
        await working.sweep()
    assert execute(
        database_url,
        "SELECT (SELECT max(up_to) FROM inbox.position WHERE reader = 'billing')"
        " = (SELECT max(seq) FROM inbox.message)",
    ) == [(True,)]


async def test_a_replica_that_was_overtaken_takes_the_lane_over_again(
    database_url: str,
) -> None:
    async with replica(database_url) as late, replica(database_url) as owner:
        await publish(database_url, *numbered(10, keys=10))
        rows = await late.claim()
        await owner.ack(*await owner.claim())
        await late.ack(*rows)
        await publish(database_url, *numbered(5, keys=5))
        assert len(await late.claim()) == 5
    assert one(database_url, "SELECT count(*) FROM inbox.deferral") == 10


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


async def test_a_kill_after_a_delivery_was_logged_behind_a_held_one_keeps_the_order(
    database_url: str,
) -> None:
    other, key = sorted(("a", "b"), key=lambda key: bucket_of(key, uuid7()))
    async with replica(database_url) as killed:
        await publish(
            database_url, *(Message("orders", text, key=key) for text in (b"0", b"1"))
        )
        head, held = await killed.claim()
        killed.lanes.give_back(held)
        await killed.refuse(head)
        await publish(database_url, Message("orders", b"2", key=key))
        await killed.queue.claim(ALL)
    make_due(database_url)
    await publish(database_url, *(Message("orders", b"", key=other) for _ in range(2)))
    # Its first claim does not reach the lane of the key.
    async with replica(database_url, prefetch=2) as next_owner:
        rows = [row for _ in range(3) for row in await next_owner.claim()]
        assert numbers([row for row in rows if row.message.key == key]) == [0, 1, 2]


@pytest.mark.parametrize("acked", [0, 1, 2])
async def test_a_kill_while_a_key_drains_loses_nothing_and_keeps_the_order(
    database_url: str, acked: int
) -> None:
    async with replica(database_url) as killed:
        await publish(database_url, *numbered(4))
        head, *_ = await killed.claim()
        await killed.refuse(head)
        await killed.claim()  # logs the deliveries behind it
    make_due(database_url)
    async with replica(database_url) as draining:
        rows = await draining.claim()
        assert numbers(rows) == [0, 1, 2, 3]
        await draining.ack(*rows[:acked])
    async with replica(database_url) as next_owner:
        await publish(database_url, Message("orders", b"4", key=rows[0].message.key))
        rows = await next_owner.claim()
        assert numbers(rows) == [0, 1, 2, 3, 4][acked:]
        await next_owner.ack(*rows)
    assert count_holding(database_url) == 0


async def test_a_blocked_key_can_have_more_deliveries_than_one_claim(
    database_url: str,
) -> None:
    async with replica(database_url, prefetch=10) as working:
        await publish(database_url, *numbered(1))
        (head,) = await working.claim()
        await working.refuse(head, timedelta(milliseconds=1))
        working.lanes.block(head)  # not due until `wait` is called
        await publish(database_url, *numbered(35)[1:], Message("orders", b"35"))
        assert numbers(await working.claim()) == [35]
        working.lanes.wait(head.lane, head.place, head.message.key, 0.0)
        drained: list[int] = []
        while rows := await working.claim():
            drained += numbers(rows)
            await working.ack(*rows)
    assert drained == [*range(35)]
    assert count_holding(database_url) == 1  # the message without a key


async def test_a_delivery_handled_for_long_does_not_hold_back_a_position(
    database_url: str,
) -> None:
    async with replica(database_url, open_after=AT_ONCE) as working:
        await publish(database_url, *numbered(30, keys=3))
        at_work, *rest = await working.claim()
        await working.ack(*rest)
        assert await working.sweep() == []
        assert one(database_url, COVERED) == 30
        async with replica(database_url) as next_owner:
            assert await next_owner.claim() == [at_work._replace(is_logged=True)]
        await working.ack(at_work)
        assert count_holding(database_url) == 0
    async with replica(database_url) as another:
        assert await another.claim() == []


async def test_a_row_inserted_by_hand_below_a_position_holds_its_day_and_is_found(
    database_url: str,
) -> None:
    async with replica(database_url) as killed:
        await publish(database_url, *numbered(64, keys=64))
        await killed.ack(*await killed.claim())
    assert one(database_url, COVERED) == 64
    ((lane,),) = execute(
        database_url, "SELECT lane FROM inbox.position ORDER BY up_to DESC LIMIT 1"
    )
    execute(database_url, BY_HAND, (0, uuid7(), lane))
    assert count_holding(database_url) == 1
    async with replica(database_url) as next_owner:
        (row,) = await next_owner.claim()
        assert row.message.payload == b"by hand"
        await next_owner.ack(row)
    assert count_holding(database_url) == 0
    async with replica(database_url) as another:
        assert await another.claim() == []


@pytest.mark.parametrize(
    "fall",
    [
        "SELECT setval('inbox.message_seq', 1, false)",
        "ALTER SEQUENCE inbox.message_seq RESTART",
    ],
)
async def test_resetting_the_sequence_loses_nothing(
    fall: str, database_url: str
) -> None:
    async with replica(database_url) as working:
        await publish(database_url, *numbered(32, keys=32))
        await working.ack(*await working.claim())
        await working.claim()
        execute(database_url, fall)
        await publish(database_url, *numbered(16, keys=16))
        # They have the same numbers and lanes as the acked deliveries.
        assert count_holding(database_url) == 16
        rows = await working.claim()
        rows += await working.claim()
        assert sorted(numbers(rows)) == [*range(16)]
        await working.ack(*rows)
    assert count_holding(database_url) == 0


@pytest.mark.parametrize("by", [1, 3, 400])
async def test_a_sequence_that_falls_and_catches_up_before_a_claim_loses_nothing(
    by: int, database_url: str
) -> None:
    async with replica(database_url, prefetch=1000) as working:
        await publish(database_url, *numbered(500))
        await working.ack(*await working.claim())
        assert await working.claim() == []
        execute(
            database_url,
            f"SELECT setval('inbox.message_seq', last_value - {by})"
            " FROM inbox.message_seq",
        )
        await publish(database_url, *numbered(by + 5))
        rows = await working.claim()
        assert numbers(rows) == [*range(by + 5)]
        await working.ack(*rows)
    assert count_holding(database_url) == 0


async def test_what_is_in_hand_when_the_sequence_is_set_back_is_not_handled_again(
    database_url: str,
) -> None:
    async with replica(database_url) as working:
        await publish(database_url, *numbered(4, keys=2))
        acked, refused, *returned = await working.claim()
        execute(database_url, "SELECT setval('inbox.message_seq', 1, false)")
        await publish(database_url, *numbered(1))
        (new,) = await working.claim()
        await working.ack(acked, new)
        await working.refuse(refused)
        for row in returned:
            working.lanes.give_back(row)
        again = await working.claim()
        assert {row.place for row in again} <= {row.place for row in returned}
        await working.ack(*again)
        for row in await working.claim():
            assert row in returned
            await working.ack(row)
    assert count_holding(database_url) == 1


@pytest.mark.parametrize("name", ["message_seq", "deferral_entry_seq"])
async def test_a_consumer_refuses_a_sequence_with_other_properties(
    name: str, database_url: str
) -> None:
    execute(database_url, f"ALTER SEQUENCE inbox.{name} CACHE 50")
    async with replica(database_url) as working:
        with pytest.raises(ConfigError, match=rf"inbox\.{name} was altered"):
            await working.claim()


async def test_a_consumer_adds_no_entries_that_rank_below_earlier_ones(
    database_url: str,
) -> None:
    async with replica(database_url) as working:
        await publish(database_url, *numbered(2, keys=2))
        for row in await working.claim():
            await working.refuse(row)
        await working.sweep()
        execute(database_url, "ALTER SEQUENCE inbox.deferral_entry_seq RESTART")
        for claim in working.sweep, working.claim:
            with pytest.raises(ConfigError, match="deferral_entry_seq was set"):
                await claim()
            working.lanes.doubt()


async def test_an_ack_does_not_apply_to_another_delivery_with_its_number(
    database_url: str,
) -> None:
    async with replica(database_url) as working:
        await publish(database_url, *numbered(1))
        (row,) = await working.claim()
        await working.ack(row)
    execute(database_url, BY_HAND, (row.seq, uuid7(), row.lane))
    status = "SELECT state FROM inbox.delivery_status ORDER BY created_at"
    assert execute(database_url, status) == [("acked",), ("ready",)]
    assert count_holding(database_url) == 1


async def test_only_subscribed_consumers_hold_a_day(database_url: str) -> None:
    execute(database_url, "INSERT INTO inbox.subscription VALUES ('audit', 'orders')")
    async with replica(database_url) as working:
        await publish(database_url, *numbered(10, keys=10))
        first, _, *rest = await working.claim()
        await working.ack(*rest)
        await working.refuse(first)
    states = (
        "SELECT consumer, state, count(*) FROM inbox.unsettled_delivery"
        " GROUP BY consumer, state ORDER BY 1, 2"
    )
    assert execute(database_url, states) == [
        ("audit", "ready", 10),
        ("billing", "ready", 1),
        ("billing", "waiting", 1),
    ]
    assert count_holding(database_url) == 12
    execute(database_url, "DELETE FROM inbox.subscription WHERE consumer = 'audit'")
    assert count_holding(database_url) == 2
    execute(database_url, "DELETE FROM inbox.subscription")
    assert execute(database_url, states) == []
    assert count_holding(database_url) == 0


async def test_a_day_is_dropped_with_its_positions_once_everything_is_acked(
    database_url: str,
) -> None:
    at = datetime.now(UTC).replace(hour=12, minute=1) - timedelta(days=40)
    owner = f"{database_url}?options=-crole%3Dpillarbox_owner"
    execute(owner, make_partitions_at("inbox.message").decode(), [[at]])
    execute(database_url, SUBSCRIBE)
    execute(
        database_url,
        "INSERT INTO inbox.message (created_at, message_id, lane, schema_version,"
        " topic, key, content_type, headers, payload)"
        " SELECT %s + n * interval '1 second', outbox.uuid7(), n %% 16, 1,"
        " 'orders', 'k' || n, 'text/plain', '{}', convert_to(n::text, 'UTF8')"
        " FROM generate_series(1, 40) AS n",
        [at],
    )
    partitions = (
        "SELECT count(*) FROM pg_inherits WHERE inhparent::regclass::text ~ '^inbox"
        '[.]"?(message|position|deferral)"?$\' AND inhrelid::regclass::text ~'
        f" '{at:%Y_?%m_?%d}'"
    )
    async with replica(database_url) as working:
        rows = await working.claim()
        assert len(rows) == 40
        waiting, *rest = rows
        await working.ack(*rest)
        await working.refuse(waiting, AT_ONCE)
        run_upkeep(database_url)
        assert one(database_url, partitions) == 3
        await working.ack(*await working.claim())
        assert count_holding(database_url) == 0
    run_upkeep(database_url)
    assert one(database_url, partitions) == 0


async def test_a_consumer_goes_on_in_another_cluster_once_it_was_migrated(
    database_url: str,
) -> None:
    async with replica(database_url) as killed:
        await publish(database_url, *numbered(30, keys=30))
        first, *rest = await killed.claim()
        await killed.ack(*rest[:-1])
        await killed.refuse(first, AT_ONCE)
    ((lane,),) = execute(
        database_url, "SELECT lane FROM inbox.position ORDER BY up_to DESC LIMIT 1"
    )
    execute(database_url, BY_HAND, (0, uuid7(), lane))
    execute(database_url, "UPDATE inbox.base SET cluster = 'another'")
    async with replica(database_url) as restored:
        with pytest.raises(ConfigError, match="run pillarbox migrate"):
            await restored.claim()
        migrate(database_url, with_cron=False)
        await publish(database_url, Message("orders", b"30"))
        rows = await restored.claim()
        wanted = [first.message.payload, rest[-1].message.payload, b"by hand", b"30"]
        payloads = {row.message.payload for row in rows}
        # What was acked ahead of a position may come again.
        assert payloads.issuperset(wanted)
        await restored.ack(*rows)
    assert count_holding(database_url) == 0
    async with replica(database_url) as next_owner:
        assert await next_owner.claim() == []


async def test_a_crash_of_the_server_loses_no_delivery(
    migrated_server: PostgresServer,
) -> None:
    url = migrated_server.url
    execute(url, "ALTER SYSTEM SET wal_writer_delay = '10s'")
    execute(url, "SELECT pg_reload_conf()")
    async with replica(url) as working:
        await publish(url, *numbered(30, keys=3))
        rows = await working.claim()
        execute(url, "CHECKPOINT")
        # None of this reaches the disk.
        await working.refuse(rows[0], AT_ONCE)
        in_hand = [row for row in rows[1:] if row.message.key == "key 0"]
        await working.ack(*(row for row in rows[1:] if row not in in_hand))
        migrated_server.restart("immediate")
        found: list[int] = []
        while True:
            with suppress(*AWAY, BrokerUnavailableError):
                again = await working.claim()
                found += numbers(again)
                await working.ack(*again, *in_hand)
                in_hand = []
                if not again:
                    break
    assert count_holding(url) == 0
    assert numbers(rows[:1])[0] in found


@pytest.mark.parametrize("outcome", ["acked", "refused", "returned"])
async def test_what_was_handed_out_in_a_lost_session_is_read_again(
    outcome: str, database_url: str
) -> None:
    """A server that crashed may have lost what the handler committed, or the row."""
    async with replica(database_url) as working:
        await publish(database_url, *numbered(4, keys=2))
        rows = await working.claim()
        *there, gone = rows
        end_session(database_url)
        execute(
            database_url,
            "UPDATE inbox.message SET message_id = outbox.uuid7(), payload = '99',"
            " created_at = created_at + interval '1 microsecond'"
            " WHERE message_id = %s",
            [gone.message.id],
        )
        with suppress(*AWAY, BrokerUnavailableError):
            await working.claim()
        others = await working.claim()
        assert numbers(others) == [99]
        for row in rows:
            if outcome == "refused":
                await working.refuse(row)
            elif outcome == "acked":
                await working.ack(row)
            else:
                working.lanes.give_back(row)
        again = await working.claim()
        assert sorted(numbers(again)) == sorted(numbers(there))
        await working.ack(*again, *others)
    assert count_holding(database_url) == 0
    assert execute(database_url, "SELECT 1 FROM inbox.deferral") == []
