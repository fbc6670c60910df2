"""The state that the next replica finds: positions, the log and held days."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pillarbox import BrokerUnavailableError, ConfigError, Message, uuid7
from pillarbox.inbox.sources.postgres.held_message import HeldMessage as Row
from pillarbox.inbox.sources.postgres.window_lane import MOST_AGAIN
from pillarbox.outbox.administration.migrate import migrate
from pillarbox.outbox.lane import bucket_of
from pillarbox.outbox.log.database_retry import DATABASE_ERRORS
from pillarbox.outbox.postgres.connection import conninfo
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.consumers import numbered
from tests.fixtures.days import make_partitions_at
from tests.fixtures.positions import count_holding
from tests.fixtures.postgres import FEW_DAYS
from tests.fixtures.relay import insert, make_due
from tests.fixtures.replicas import INSERT, OURS, replica, subscribe, unsubscribe
from tests.fixtures.sessions import execute
from tests.fixtures.upkeep import run_upkeep
from tests.migrations.test_dump_and_restore import carry, run
from tests.relay.test_restored import other_cluster, other_data

__all__ = ["other_cluster", "other_data"]

AT_ONCE = timedelta(0)
STATES = """
    SELECT state FROM outbox.message_status
     WHERE reader = 'billing' ORDER BY created_at
"""
UNSETTLED = """
    SELECT reader, state, count(*) FROM outbox.unsettled_message
     GROUP BY reader, state ORDER BY 1, 2
"""
WRITES = """
    SELECT sum(n_tup_upd), sum(n_tup_del) FROM pg_stat_user_tables
     WHERE schemaname = 'outbox' AND relname ~ '^(message|position|deferral)_p'
"""


def numbers(rows: Sequence[Row]) -> list[int]:
    return [int(row.message.payload) for row in rows]


async def handle(replica: Any, count: int) -> tuple[list[Any], list[Any]]:
    """Handle so many messages, in order; return them, and those in hand after them."""
    handled: list[Any] = []
    in_hand: list[Any] = []
    while len(handled) < count or not in_hand:
        claimed = await replica.claim()
        if not claimed and not in_hand:
            break
        in_hand += claimed
        now, in_hand = in_hand[: count - len(handled)], in_hand[count - len(handled) :]
        await replica.ack(*now)
        handled += now
    return handled, in_hand


def end_session(url: str) -> None:
    execute(
        url,
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
        " WHERE application_name = 'test' AND datname = current_database()",
    )


def one(url: str, query: str) -> Any:
    ((value,),) = execute(url, query)
    return value


def covered(url: str) -> int:
    """Return how many messages positions cover."""
    query = "SELECT coalesce(sum(messages), 0)::int FROM outbox.position"
    return int(one(url, query))


def insert_by_hand(url: str, seq: int) -> None:
    """Insert a message into the lane whose position is the highest."""
    last = "SELECT lane FROM outbox.position ORDER BY up_to DESC LIMIT 1"
    execute(url, INSERT, (seq, one(url, last), b"by hand"))


async def test_nothing_is_ever_updated_or_deleted(database_url: str) -> None:
    async with replica(database_url) as working:
        insert(database_url, *numbered(50, keys=10))
        rows = await working.claim()
        await working.refuse(rows[0], AT_ONCE)
        await working.ack(*rows[1:])
        await working.ack(*await working.claim())
        await working.leave()
    with suppress(psycopg.errors.UndefinedFunction):  # of PostgreSQL 15
        execute(database_url, "SELECT pg_stat_force_next_flush()")
    assert execute(database_url, WRITES) == [(0, 0)]
    assert covered(database_url) == 50
    assert one(database_url, "SELECT count(*) FROM outbox.position") < 49


async def test_the_next_owner_finds_only_unacked_deliveries(database_url: str) -> None:
    async with replica(database_url) as killed:
        insert(database_url, *numbered(20, keys=20))
        rows = await killed.claim()
        await killed.ack(*rows[:15])
    async with replica(database_url) as next_owner:
        again = await next_owner.claim()
    assert sorted(numbers(again)) == sorted(numbers(rows[15:]))


async def test_a_killed_replica_gets_a_bounded_number_of_acked_deliveries_again(
    database_url: str,
) -> None:
    async with replica(database_url, prefetch=1000) as killed:
        insert(database_url, *(Message("orders", b"0", key="k") for _ in range(400)))
        first, *rest = await killed.claim()
        for row in rest:
            await killed.ack(row)
    assert one(database_url, "SELECT cause FROM outbox.deferral") == "open"
    async with replica(database_url, prefetch=1000) as next_owner:
        again = await next_owner.claim()
    assert again[0].place == first.place
    assert len(again) <= MOST_AGAIN + 1


async def test_a_replica_that_leaves_hands_over_only_what_is_not_acked(
    database_url: str,
) -> None:
    async with replica(database_url) as leaving:
        insert(database_url, *numbered(30, keys=3))
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
    by_hand = INSERT.replace("(seq, ", "(", 1).replace("(%s, ", "(", 1)
    async with replica(database_url) as killed:
        with psycopg.connect(conninfo(database_url)) as slow:
            slow.execute(by_hand.encode(), (OURS[7], b"99"))
            insert(database_url, *numbered(30, keys=30))
            await killed.ack(*await killed.claim())
            async with replica(database_url) as next_owner:
                assert await next_owner.claim() == []
                slow.commit()
                assert count_holding(database_url) == 1
                assert numbers(await next_owner.claim()) == [99]


async def test_a_topic_subscribed_later_brings_no_older_messages(
    database_url: str,
) -> None:
    subscribe(database_url, "audit", "*")
    async with replica(database_url) as working:
        old = [Message("refunds", b"0", key=str(n)) for n in range(20)]
        insert(database_url, *old, *numbered(20, keys=20))
        subscribe(database_url, "billing", "ref*")
        new = [Message("refunds", b"0", key=str(n)) for n in range(20)]
        insert(database_url, *new)
        rows = await working.claim()
        await working.ack(*rows)
    ids = {row.message.id for row in rows if row.message.topic == "refunds"}
    assert ids == {message.id for message in new}
    assert len(rows) == 40
    unsubscribe(database_url, "audit")
    assert count_holding(database_url) == 0


async def test_a_claim_bounds_the_rows_that_it_reads(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pillarbox.outbox.log.claim._MOST_OTHERS", 10)
    subscribe(database_url, "audit", "*")
    async with replica(database_url) as working:
        insert(
            database_url,
            *(Message("other", b"0", key="k") for _ in range(95)),
            Message("orders", b"1", key="k"),
            *(Message("other", b"0", key="k") for _ in range(95)),
        )
        rows = await working.claim()
        while not rows:
            rows = await working.claim()
        assert numbers(rows) == [1]
        await working.ack(*rows)
        assert await working.claim() == []
        await working.sweep()
    last, position = (
        one(database_url, f"SELECT max({column}) FROM outbox.{table}")
        for column, table in (("seq", "message"), ("up_to", "position"))
    )
    assert last == position


async def test_a_replica_that_was_overtaken_takes_the_lane_over_again(
    database_url: str,
) -> None:
    async with replica(database_url) as late, replica(database_url) as owner:
        insert(database_url, *numbered(10, keys=10))
        rows = await late.claim()
        await owner.ack(*await owner.claim())
        await late.ack(*rows)
        insert(database_url, *numbered(5, keys=5))
        rows = await late.claim()
        assert len(rows) == 5
        await late.ack(*rows)
    assert count_holding(database_url) == 0


async def test_deliveries_waiting_for_their_key_come_in_order_after_a_kill(
    database_url: str,
) -> None:
    async with replica(database_url) as killed:
        insert(database_url, *numbered(3))
        head, *_ = await killed.claim()
        await killed.refuse(head, AT_ONCE)
        # The deliveries claimed behind it are not logged yet.
    async with replica(database_url) as next_owner:
        rows, _ = await handle(next_owner, 3)
        assert numbers(rows) == [0, 1, 2]
        assert [held.row.attempts for held in rows] == [1, 0, 0]


async def test_a_kill_after_a_delivery_was_logged_behind_a_held_one_keeps_the_order(
    database_url: str,
) -> None:
    other, key = sorted(("a", "b"), key=lambda key: bucket_of(key, uuid7()))
    async with replica(database_url) as killed:
        insert(
            database_url, *(Message("orders", text, key=key) for text in (b"0", b"1"))
        )
        head, held = await killed.claim()
        killed.give_back(held)
        await killed.refuse(head)
        insert(database_url, Message("orders", b"2", key=key))
        await killed.read()
    make_due(database_url)
    insert(database_url, *(Message("orders", b"", key=other) for _ in range(2)))
    # Its first claim does not reach the lane of the key.
    async with replica(database_url, prefetch=2) as next_owner:
        rows, _ = await handle(next_owner, 5)
        assert numbers([row for row in rows if row.message.key == key]) == [0, 1, 2]


@pytest.mark.parametrize("acked", [0, 1, 2])
async def test_a_kill_while_a_key_drains_loses_nothing_and_keeps_the_order(
    database_url: str, acked: int
) -> None:
    async with replica(database_url) as killed:
        insert(database_url, *numbered(4))
        head, *_ = await killed.claim()
        await killed.refuse(head)
        await killed.claim()  # logs the deliveries behind it
    make_due(database_url)
    async with replica(database_url) as draining:
        rows, in_hand = await handle(draining, acked)
        assert numbers([*rows, *in_hand]) == [*range(len(rows) + len(in_hand))]
        assert len(rows) == acked
    async with replica(database_url) as next_owner:
        insert(database_url, Message("orders", b"4", key=head.message.key))
        rows, _ = await handle(next_owner, 5 - acked)
        assert numbers(rows) == [0, 1, 2, 3, 4][acked:]
    assert count_holding(database_url) == 0


async def test_a_blocked_key_can_have_more_deliveries_than_one_claim(
    database_url: str,
) -> None:
    async with replica(database_url, prefetch=10) as working:
        insert(database_url, *numbered(1))
        (head,) = await working.claim()
        await working.refuse(head)
        # A claim of its own lane would be full of those that are blocked.
        other = Message("orders", b"35")
        while bucket_of(None, other.id) == bucket_of("key 0", other.id):
            other = Message("orders", b"35")
        insert(database_url, *numbered(35)[1:], other)
        assert numbers(await working.claim()) == [35]
        make_due(database_url)
        working.sweep_soon()
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
        insert(database_url, *numbered(30, keys=3))
        at_work, *rest = await working.claim()
        await working.ack(*rest)
        assert await working.sweep() == []
        assert covered(database_url) == 30
        async with replica(database_url) as next_owner:
            (again,) = await next_owner.claim()
            assert again.place == at_work.place
        await working.ack(at_work)
        assert count_holding(database_url) == 0
    async with replica(database_url) as another:
        assert await another.claim() == []


async def test_a_row_inserted_by_hand_below_a_position_holds_its_day_and_is_found(
    database_url: str,
) -> None:
    async with replica(database_url) as killed:
        insert(database_url, *numbered(64, keys=64))
        await killed.ack(*await killed.claim())
    assert covered(database_url) == 64
    insert_by_hand(database_url, 0)
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
        "SELECT setval('outbox.message_seq', 1, false)",
        "ALTER SEQUENCE outbox.message_seq RESTART",
    ],
)
async def test_resetting_the_sequence_loses_nothing(
    fall: str, database_url: str
) -> None:
    async with replica(database_url) as working:
        insert(database_url, *numbered(32, keys=32))
        await working.ack(*await working.claim())
        await working.claim()
        execute(database_url, fall)
        insert(database_url, *numbered(16, keys=16))
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
        insert(database_url, *numbered(500))
        await working.ack(*await working.claim())
        assert await working.claim() == []
        execute(
            database_url,
            f"SELECT setval('outbox.message_seq', last_value - {by})"
            f" FROM outbox.message_seq",
        )
        insert(database_url, *numbered(by + 5))
        rows = await working.claim()
        assert numbers(rows) == [*range(by + 5)]
        await working.ack(*rows)
    assert count_holding(database_url) == 0


@pytest.mark.parametrize("name", ["message_seq", "deferral_entry_seq"])
async def test_a_consumer_refuses_a_sequence_with_other_properties(
    name: str, database_url: str
) -> None:
    execute(database_url, f"ALTER SEQUENCE outbox.{name} CACHE 50")
    async with replica(database_url) as working:
        with pytest.raises(ConfigError, match=rf"\.{name} was altered"):
            await working.claim()


async def test_a_consumer_adds_no_entries_that_rank_below_earlier_ones(
    database_url: str,
) -> None:
    async with replica(database_url) as working:
        insert(database_url, *numbered(2, keys=2))
        for row in await working.claim():
            await working.refuse(row)
        await working.sweep()
        sequence = "outbox.deferral_entry_seq"
        execute(database_url, f"ALTER SEQUENCE {sequence} RESTART")
        for claim in working.sweep, working.claim:
            with pytest.raises(ConfigError, match="deferral_entry_seq was set"):
                await claim()
            working.doubt()


async def test_an_ack_does_not_apply_to_another_delivery_with_its_number(
    database_url: str,
) -> None:
    async with replica(database_url) as working:
        insert(database_url, *numbered(1))
        (row,) = await working.claim()
        await working.ack(row)
    insert_by_hand(database_url, row.place[0])
    assert execute(database_url, STATES) == [("handled",), ("ready",)]
    assert count_holding(database_url) == 1


async def test_only_subscribed_consumers_hold_a_day(database_url: str) -> None:
    subscribe(database_url, "audit", "orders")
    async with replica(database_url) as working:
        insert(database_url, *numbered(10, keys=10))
        first, _, *rest = await working.claim()
        await working.ack(*rest)
        await working.refuse(first)
    assert execute(database_url, UNSETTLED) == [
        ("audit", "ready", 10),
        ("billing", "ready", 1),
        ("billing", "waiting", 1),
    ]
    assert count_holding(database_url) == 12
    unsubscribe(database_url, "audit")
    assert count_holding(database_url) == 2
    unsubscribe(database_url, "billing")
    assert execute(database_url, UNSETTLED) == []
    assert count_holding(database_url) == 0


async def test_a_day_is_dropped_with_its_positions_once_everything_is_acked(
    database_url: str,
) -> None:
    at = datetime.now(UTC).replace(hour=12, minute=1) - timedelta(days=40)
    owner = f"{database_url}?options=-crole%3Dpillarbox_owner"
    execute(owner, make_partitions_at("outbox.message").decode(), [[at]])
    subscribe(database_url, "billing", "orders")
    execute(
        database_url,
        f"INSERT INTO outbox.message (created_at, id, lane,"
        " schema_version, topic, key, content_type, headers, payload)"
        f" SELECT %s + n * interval '1 second', outbox.uuid7(), {OURS[0]} +"
        " n %% 16, 1,"
        " 'orders', 'k' || n, 'text/plain', '{}', convert_to(n::text, 'UTF8')"
        " FROM generate_series(1, 40) AS n",
        [at],
    )
    partitions = (
        "SELECT count(*) FROM pg_inherits WHERE inhparent::regclass::text ~"
        f" '^outbox"
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
        insert(database_url, *numbered(30, keys=30))
        first, *rest = await killed.claim()
        await killed.ack(*rest[:-1])
        await killed.refuse(first, AT_ONCE)
    insert_by_hand(database_url, 0)
    execute(database_url, "UPDATE outbox.base SET cluster = 'another'")
    async with replica(database_url) as restored:
        with pytest.raises(ConfigError, match="run pillarbox migrate"):
            await restored.claim()
        migrate(database_url, with_cron=False)
        insert(database_url, Message("orders", b"30"))
        rows = await restored.claim()
        wanted = [first.message.payload, rest[-1].message.payload, b"by hand", b"30"]
        payloads = {row.message.payload for row in rows}
        # What was acked ahead of a position may come again.
        assert payloads.issuperset(wanted)
        await restored.ack(*rows)
    assert count_holding(database_url) == 0
    async with replica(database_url) as next_owner:
        assert await next_owner.claim() == []


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("alone")
async def test_a_consumer_goes_on_where_it_was_once_a_dump_was_restored(
    database_url: str,
    server: PostgresServer,
    other_cluster: PostgresServer,
    tmp_path: Path,
) -> None:
    target = other_cluster.url
    async with replica(database_url) as killed:
        insert(database_url, *numbered(30, keys=30))
        refused, *rest = await killed.claim()
        await killed.ack(*rest)
        await killed.refuse(refused)
    roles, file = str(tmp_path / "roles.sql"), str(tmp_path / "dump")
    assert run("pg_dumpall", "--roles-only", "--file", roles, "-d", server.url) == []
    run("psql", "-X", "-q", "-f", roles, target)
    assert carry(database_url, target, file) == []
    migrate(target, with_cron=False, days_ahead=FEW_DAYS)
    insert(target, Message("orders", b"30", key=refused.message.key))
    make_due(target)
    async with replica(target) as restored:
        rows, _ = await handle(restored, 31)
    assert numbers(rows) == [*numbers([refused]), 30]
    assert count_holding(target) == 0


async def test_a_crash_of_the_server_loses_no_delivery(
    migrated_server: PostgresServer,
) -> None:
    url = migrated_server.url
    execute(url, "ALTER SYSTEM SET wal_writer_delay = '10s'")
    execute(url, "SELECT pg_reload_conf()")
    async with replica(url) as working:
        insert(url, *numbered(30, keys=3))
        rows = await working.claim()
        execute(url, "CHECKPOINT")
        # None of this reaches the disk.
        await working.refuse(rows[0], AT_ONCE)
        in_hand = [row for row in rows[1:] if row.message.key == "key 0"]
        await working.ack(*(row for row in rows[1:] if row not in in_hand))
        migrated_server.restart("immediate")
        found: list[int] = []
        while True:
            with suppress(*DATABASE_ERRORS, BrokerUnavailableError):
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
        insert(database_url, *numbered(4, keys=2))
        rows = await working.claim()
        *there, gone = rows
        end_session(database_url)
        execute(
            database_url,
            "UPDATE outbox.message SET id = outbox.uuid7(),"
            " payload = '99', created_at = created_at + interval '1 microsecond'"
            " WHERE id = %s",
            [gone.message.id],
        )
        again: list[Row] = []
        with suppress(*DATABASE_ERRORS, BrokerUnavailableError):
            again += await working.claim()
        for row in rows:
            if outcome == "refused":
                await working.refuse(row)
            elif outcome == "acked":
                await working.ack(row)
            else:
                working.give_back(row)
        while len(again) < len(rows):
            with suppress(*DATABASE_ERRORS, BrokerUnavailableError):
                again += await working.claim()
        assert sorted(numbers(again)) == [*sorted(numbers(there)), 99]
        await working.ack(*again)
    assert count_holding(database_url) == 0
    assert execute(database_url, "SELECT 1 FROM outbox.deferral") == []
