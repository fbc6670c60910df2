"""Claims: concurrent settlement, watermarks, open transactions, large headers."""

from datetime import UTC, datetime, timedelta

import psycopg
import pytest

import relay.claim
from outbox import Message, uuid7
from outbox.lane import PRIORITIES, Priority, lane_of, lanes_of
from outbox.postgres.connection import Connection, connect, conninfo
from relay.claim import Batch, claim_batch, raise_watermarks
from relay.config import RelayConfig
from relay.lanes.board import LaneBoard
from tests.fixtures.claimed import HeldLease
from tests.fixtures.limits import lift_limits
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import defer, insert, mark_published, running
from tests.fixtures.sessions import execute

INSERT = """
    INSERT INTO outbox.message (id, created_at, lane, topic, key, content_type, payload)
    VALUES (%s, %s, outbox.lane_of('k', outbox.uuid7(), 'default'), 'orders.placed',
            'k', 'text/plain', '')
"""

# Summed over days, because the messages may span midnight.
WATERMARKS = """
    SELECT above, up_to, sum(messages)::int
      FROM outbox.watermark GROUP BY lane, above, up_to ORDER BY above, up_to
"""
OTHER_DAYS = """
    INSERT INTO outbox.message (id, created_at, lane, topic, content_type, payload)
    SELECT outbox.uuid7(), date_trunc('day', now(), 'UTC') + days * interval '25 hours',
           20, 't', 'text/plain', ''
      FROM unnest(ARRAY[-1, 0, 0, 1, 1, 1]) AS days
"""


@pytest.mark.parametrize("moment", ["_find_unmarked", "_read_deferrals", "_refresh"])
async def test_a_nack_settled_late_does_not_let_a_key_overtake_its_head(
    moment: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert(database_url, Message("head", b"", key="k"), Message("next", b"", key="k"))
    original = getattr(relay.claim, moment)

    async def interrupted(*arguments: object) -> object:
        result = await original(*arguments)
        defer(database_url, "head")
        return result

    monkeypatch.setattr(relay.claim, moment, interrupted)
    async with await connect(database_url, application_name="test") as connection:
        batch = await claim(connection, board_of_all_lanes())

    assert [row.topic for row in batch.rows] == ["head", "next"]


async def test_a_relay_that_takes_over_starts_at_the_watermark(
    database_url: str,
) -> None:
    insert(database_url, *(Message("t", b"", key="same") for _ in range(20)))
    mark_published(database_url, "t")
    insert(database_url, Message("scheduled", b"", key="same"))
    defer(database_url, "scheduled")
    async with await connect(database_url, application_name="test") as connection:
        assert not (await claim(connection, board_of_all_lanes())).rows
        insert(database_url, Message("next", b"", key="other"))
        board = board_of_all_lanes()
        assert [row.topic for row in (await claim(connection, board)).rows] == ["next"]

    lane = board.find(lane_of("same", uuid7(), Priority.DEFAULT))
    assert lane is not None
    assert lane.watermark == lane.floor >= 21
    assert lane.deferrals.blocked == {"same"}
    assert execute(database_url, WATERMARKS) == [(-1, 21, 21)]
    assert execute(database_url, "SELECT DISTINCT lane FROM outbox.watermark") == [
        (lane.number,)
    ]


async def test_a_watermark_stops_below_a_message_without_a_mark(
    database_url: str,
) -> None:
    messages = [Message(f"t/{n}", b"", key="same") for n in range(5)]
    insert(database_url, *messages)
    async with await connect(database_url, application_name="test") as connection:
        board = board_of_all_lanes()
        assert len((await claim(connection, board)).rows) == 5
        # As if the relay had been killed after marking all but one.
        for n in (0, 1, 3, 4):
            mark_published(database_url, f"t/{n}")
        batch = await claim(connection, board_of_all_lanes())

    assert [row.topic for row in batch.rows] == ["t/2"]
    assert execute(database_url, WATERMARKS) == [(-1, 2, 2)]


async def test_a_watermark_does_not_rise_above_an_open_transaction(
    database_url: str,
) -> None:
    insert(database_url, Message("first", b"", key="k"))
    with psycopg.connect(conninfo(database_url)) as writer:
        writer.execute(INSERT, (uuid7(), datetime.now(UTC)))
        insert(database_url, Message("last", b"", key="k"))
        mark_published(database_url, "first")
        mark_published(database_url, "last")
        async with await connect(database_url, application_name="test") as connection:
            assert not (await claim(connection, board_of_all_lanes())).rows
            assert execute(database_url, "SELECT FROM outbox.watermark") == []
            writer.commit()

            batch = await claim(connection, board_of_all_lanes())
    assert [row.topic for row in batch.rows] == ["orders.placed"]


async def test_with_a_long_open_transaction_each_message_is_still_claimed_once(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay.claim, "_MOST_AHEAD", 5)
    monkeypatch.setattr(relay.claim, "_STEP", 4)
    publisher = ScriptedPublisher()
    with psycopg.connect(conninfo(database_url)) as writer:
        writer.execute(INSERT, (uuid7(), datetime.now(UTC)))
        async with running(database_url, publisher, batch_size=3):
            for n in range(0, 40, 10):
                insert(
                    database_url,
                    *[Message(f"k/{n + i}", b"", key="k") for i in range(10)],
                )
                await publisher.until_acked(n + 10)
            writer.commit()
            insert(database_url, Message("k/40", b"", key="k"))
            await publisher.until_acked(42)

    topics = publisher.topics()
    assert topics == [*topics[:40], "orders.placed", "k/40"]
    assert publisher.of_key("k")[:40] == [f"k/{n}" for n in range(40)]
    assert len(publisher.acked) == 42


async def test_messages_are_verified_step_by_step(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay.claim, "_STEP", 3)
    insert(database_url, *(Message("t", b"", key="same") for _ in range(20)))
    mark_published(database_url, "t")
    execute(database_url, "SELECT setval('outbox.message_seq', 1000000000)")
    insert(database_url, Message("far", b"", key="same"))
    async with await connect(database_url, application_name="test") as connection:
        board = board_of_all_lanes()
        batch = await claim(connection, board)
        assert [row.topic for row in batch.rows] == ["far"]
        assert execute(database_url, WATERMARKS) == [(-1, 2, 2)]
        mark_published(database_url, "far")
        execute(database_url, "SELECT nextval('outbox.message_seq')")
        lanes = [lane for n in board.numbers() if (lane := board.find(n)) is not None]
        await raise_watermarks(connection, board, lanes)

    _, *raised = execute(database_url, WATERMARKS)
    assert {above for above, _, _ in raised} == {2}
    assert sum(messages for _, _, messages in raised) == 19
    assert max(up_to for _, up_to, _ in raised) > 1_000_000_000


@pytest.mark.week
async def test_a_watermark_covers_the_messages_of_other_days(
    database_url: str,
) -> None:
    execute(database_url, OTHER_DAYS)
    mark_published(database_url, "t")
    async with await connect(database_url, application_name="test") as connection:
        await claim(connection, board_of_all_lanes())

    assert execute(
        database_url,
        "SELECT w.messages, count(*) FROM outbox.watermark w"
        "  JOIN outbox.message m ON m.lane = w.lane"
        "   AND date_trunc('day', m.created_at, 'UTC') = w.created_at"
        " GROUP BY w.lane, w.created_at, w.messages ORDER BY w.created_at",
    ) == [(n, n) for n in (1, 2, 3)]


async def test_messages_verified_on_a_broken_connection_are_verified_again(
    database_url: str,
) -> None:
    insert(database_url, *(Message(f"t/{n}", b"", key="same") for n in range(3)))
    mark_published(database_url, "t/0")
    board = board_of_all_lanes()
    async with await connect(database_url, application_name="test") as connection:
        await claim(connection, board)
        for n in (1, 2):
            mark_published(database_url, f"t/{n}")
        board.wake(refresh=True)
        await claim(connection, board)
    lane = board.find(lane_of("same", uuid7(), Priority.DEFAULT))
    assert lane is not None
    assert (lane.watermark, lane.verified) == (1, 3)

    # A crash of the server can lose marks: their commits don't wait for the disk.
    execute(
        database_url,
        "DELETE FROM outbox.settlement s USING outbox.message m"
        " WHERE m.topic = 't/1' AND m.id = ANY (s.ids)",
    )
    async with await connect(database_url, application_name="test") as connection:
        board.wake(refresh=True)
        await claim(connection, board)
        batch = await claim(connection, board)

    assert [row.topic for row in batch.rows] == ["t/1"]
    assert (lane.watermark, lane.verified) == (1, 1)


async def test_a_watermark_above_the_sequence_is_ignored(
    database_url: str,
) -> None:
    insert(database_url, *(Message("t", b"", key="same") for _ in range(3)))
    mark_published(database_url, "t")
    async with await connect(database_url, application_name="test") as connection:
        board = board_of_all_lanes()
        await claim(connection, board)
        execute(database_url, "ALTER SEQUENCE outbox.message_seq RESTART")
        insert(database_url, Message("again", b"", key="same"))

        batches = [await claim(connection, b) for b in (board_of_all_lanes(), board)]
        board.wake(refresh=True)
        batches.append(await claim(connection, board))

    assert [[row.topic for row in batch.rows] for batch in batches] == [
        ["again"],
        [],
        ["again"],
    ]


async def test_a_message_written_hours_ago_is_claimed_as_soon_as_it_commits(
    database_url: str,
) -> None:
    board = board_of_all_lanes()
    with psycopg.connect(conninfo(database_url)) as writer:
        # The transaction began before the relay.
        writer.execute(INSERT, (uuid7(), datetime.now(UTC) - timedelta(hours=5)))
        async with await connect(database_url, application_name="test") as connection:
            assert not (await claim(connection, board)).rows
            writer.commit()

            board.wake()
            assert len((await claim(connection, board)).rows) == 1


async def test_without_open_transactions_a_claim_looks_back_an_hour(
    database_url: str,
) -> None:
    board = board_of_all_lanes()
    async with await connect(database_url, application_name="test") as connection:
        await claim(connection, board)

    oldest, _ = board.bounds([lane for n in board.numbers() if (lane := board.find(n))])
    assert timedelta(minutes=59) < datetime.now(UTC) - oldest < timedelta(minutes=70)


async def test_large_headers_are_read_at_most_a_few_times_before_they_are_loaded(
    database_url: str,
) -> None:
    insert(database_url, *(Message("t", b"", key="same") for _ in range(24)))
    execute(
        database_url,
        "UPDATE outbox.message"
        " SET headers = jsonb_build_object('h', repeat('x', 250000))",
    )
    insert(database_url, *(Message("t", b"", key="same") for _ in range(100)))
    board = board_of_all_lanes()
    async with await connect(database_url, application_name="test") as connection:
        loaded = 0
        # Each claim loads some, until all are loaded.
        while loaded < 124:
            board.wake()
            found = len((await claim(connection, board)).rows)
            assert found > 0
            loaded += found
            # The server reads at most this many of the ready rows.
            worth_reading = board.rows_worth_reading(RelayConfig().batch_size)
            assert worth_reading <= max(16, 2 * (found + 1))


@pytest.mark.parametrize("megabytes", [2, 30])
async def test_headers_that_take_long_to_decompress_are_not_moved_with_the_batch(
    megabytes: int, database_url: str
) -> None:
    lift_limits(database_url)
    insert(database_url, Message("large", b"", headers={"h": "v"}))
    # Compresses to less than a hundredth of this size.
    execute(
        database_url,
        "UPDATE outbox.message SET headers = jsonb_build_object('h', repeat('x', %s))",
        [megabytes * 1_000_000],
    )
    async with await connect(database_url, application_name="test") as connection:
        batch = await claim(connection, board_of_all_lanes())

    assert batch.rows == []
    (problem,) = [row.problem for row in batch.oversized]
    assert problem == "headers is over 262144 bytes"


def board_of_all_lanes() -> LaneBoard:
    numbers = [number for priority in PRIORITIES for number in lanes_of(priority)]
    board = LaneBoard(HeldLease(numbers), RelayConfig().weights, 1)
    board.take(numbers)
    return board


async def claim(connection: Connection, board: LaneBoard) -> Batch:
    lanes = board.pick()
    batch = await claim_batch(connection, board, lanes, RelayConfig())
    board.put_back(lanes)
    return batch
