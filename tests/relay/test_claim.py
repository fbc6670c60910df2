"""Claims: concurrent settlement, late commits, open transactions, large headers."""

import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import pillarbox.outbox.log.claim
from pillarbox import Message, uuid7
from pillarbox.inbox.sources.postgres.window_lane import WindowLane
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import add_reader
from pillarbox.outbox.lane import PRIORITIES, Priority, lane_of, lanes_of
from pillarbox.outbox.log.claim import claim_batch
from pillarbox.outbox.log.lanes.batch import ClaimedBatch
from pillarbox.outbox.log.lanes.board import LaneBoard
from pillarbox.outbox.log.lanes.lane import Lane
from pillarbox.outbox.log.process import SETTINGS
from pillarbox.outbox.postgres.advisory_lock import MAIN
from pillarbox.outbox.postgres.connection import (
    NOT_PREPARED,
    Connection,
    connect,
    conninfo,
)
from pillarbox.relay.config import RelayConfig
from pillarbox.relay.reader import RelayReader
from tests.fixtures.claimed import HeldLease
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import defer, insert, mark_published, running, unsettled
from tests.fixtures.sessions import execute

TODAY = "SELECT current_date"
SUBSCRIBE = "SELECT outbox.subscribe('invoices', '{orders}', NULL, false, NULL)"

INSERT = """
    INSERT INTO outbox.message (id, created_at, lane, topic, key, content_type, payload)
    VALUES (%s, %s, outbox.lane_of('k', outbox.uuid7(), 'default'), 'orders.placed',
            'k', 'text/plain', '')
"""

WITH_SEQ = """
    INSERT INTO outbox.message (id, seq, lane, topic, key, content_type, payload)
    VALUES (outbox.uuid7(), %s, outbox.lane_of('k', outbox.uuid7(), 'default'), %s,
            'k', 'text/plain', %s)
"""
LARGE = """
    INSERT INTO outbox.message (id, lane, topic, key, content_type, payload)
    VALUES (outbox.uuid7(), outbox.lane_of('k', outbox.uuid7(), 'default'), 'large',
            'k', 'text/plain', convert_to(repeat('x', 3000), 'UTF8'))
"""


@pytest.mark.parametrize("moment", ["_read_deferrals", "_refresh"])
async def test_a_nack_settled_late_does_not_let_a_key_overtake_its_head(
    moment: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert(database_url, Message("head", b"", key="k"), Message("next", b"", key="k"))
    original = getattr(pillarbox.outbox.log.claim._Claim, moment)

    async def interrupted(*arguments: object) -> object:
        result = await original(*arguments)
        defer(database_url, "head")
        return result

    monkeypatch.setattr(pillarbox.outbox.log.claim._Claim, moment, interrupted)
    async with await connect(database_url, application_name="test") as connection:
        batch = await claim(connection, board_of_all_lanes())

    assert [row.topic for row in batch.rows] == ["head", "next"]


PLANS = """
    SELECT generic_plans, custom_plans FROM pg_prepared_statements
     WHERE statement LIKE '%Read the next messages%'
"""


async def test_claims_of_a_day_share_one_plan_and_other_statements_have_none(
    database_url: str,
) -> None:
    insert(database_url, Message("t", b""))
    board = board_of_all_lanes()
    async with await connect(
        database_url,
        application_name="test",
        settings=SETTINGS,
        prepare_threshold=NOT_PREPARED,
    ) as connection:
        for _ in range(20):
            assert len((await claim(connection, board)).rows) == 1
            await connection.execute("SELECT 1")
        found = await (await connection.execute(PLANS)).fetchall()
        cursor = await connection.execute("SELECT count(*) FROM pg_prepared_statements")
        prepared = await cursor.fetchone()

    # PostgreSQL plans the first five for their parameters.
    assert sum(generic for generic, _ in found) >= 10, found
    assert prepared == (len(found),)


@pytest.mark.parametrize("kind", [Lane, WindowLane])
async def test_each_idle_lane_costs_a_claim_at_most_eight_calls_of_python(
    kind: type[Lane], database_url: str
) -> None:
    # Each message that comes alone costs a claim of all lanes.
    none: Any = {}
    calls: Counter[int] = Counter()
    async with await connect(database_url, application_name="test") as connection:
        for lanes in (16, 48):
            board = LaneBoard(HeldLease(range(lanes)), 1)
            if kind is WindowLane:
                board.make_lane = lambda number: WindowLane(number, none, none)
            board.take(range(lanes))
            assert not (await claim(connection, board)).rows

            def called(_: object, event: str, __: object, lanes: int = lanes) -> None:
                calls[lanes] += event == "call"

            sys.setprofile(called)
            try:
                board.wake()
                await claim(connection, board)
            finally:
                sys.setprofile(None)

    # Waiting for the server can take some more.
    assert (calls[48] - calls[16]) / 32 < 9


async def test_a_relay_that_takes_over_starts_at_the_position(
    database_url: str,
) -> None:
    began = execute(database_url, TODAY)
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
    assert lane.progress is not None
    starts = [part.start for part in lane.progress.parts()]
    # A day that began in the meantime is read from its beginning.
    has_begun = execute(database_url, TODAY) != began
    assert {*starts} == {21} or (has_begun and starts == [21, -1])
    assert lane.keys.blocked == {"same"}


@pytest.mark.parametrize("beside_a_new_lane", [False, True])
async def test_a_message_that_commits_below_the_position_is_claimed(
    beside_a_new_lane: bool, database_url: str
) -> None:
    insert(database_url, Message("first", b"", key="k"))
    with psycopg.connect(conninfo(database_url)) as writer:
        writer.execute(INSERT, (uuid7(), datetime.now(UTC)))
        insert(database_url, Message("last", b"", key="k"))
        mark_published(database_url, "first")
        mark_published(database_url, "last")
        async with await connect(database_url, application_name="test") as connection:
            board = board_of_all_lanes()
            assert not (await claim(connection, board)).rows
            writer.commit()

            board.wake()
            if beside_a_new_lane:
                other, *_ = lanes_of(Priority.BULK)
                board.take([other])
            batches = [
                await claim(connection, b) for b in (board_of_all_lanes(), board)
            ]
    assert [[row.topic for row in batch.rows] for batch in batches] == [
        ["orders.placed"]
    ] * 2


async def test_beside_a_long_open_transaction_each_message_is_published_once(
    database_url: str,
) -> None:
    publisher = ScriptedPublisher()
    with psycopg.connect(conninfo(database_url)) as writer:
        # More than one claim has.
        for _ in range(10):
            writer.execute(INSERT, (uuid7(), datetime.now(UTC)))
        async with running(database_url, publisher, batch_size=3):
            for n in range(0, 40, 10):
                insert(
                    database_url,
                    *[Message(f"k/{n + i}", b"", key="k") for i in range(10)],
                )
                await publisher.until_acked(n + 10)
            writer.commit()
            await publisher.until_acked(50)
            insert(database_url, Message("k/40", b"", key="k"))
            await publisher.until_acked(51)

    expected = [f"k/{n}" for n in range(40)]
    assert publisher.topics() == [*expected, *["orders.placed"] * 10, "k/40"]
    assert unsettled(database_url) == 0


async def test_a_transaction_with_many_savepoints_does_not_make_claims_longer(
    database_url: str,
) -> None:
    board = board_of_all_lanes()
    with psycopg.connect(conninfo(database_url)) as writer:
        writer.execute("CREATE TEMP TABLE many (n integer)")
        writer.execute(
            "DO $$ BEGIN FOR n IN 1..5000 LOOP BEGIN INSERT INTO many VALUES (n);"
            " EXCEPTION WHEN division_by_zero THEN RETURN; END; END LOOP; END $$"
        )
        async with await connect(database_url, application_name="test") as connection:
            lanes = board.pick()
            await claim_batch(connection, board, lanes, RelayConfig())
            parameters = board.reader.claims.plan(lanes).parameters
            assert len(parameters["hidden"]) < 100
            board.put_back(lanes)
            writer.execute(INSERT, (uuid7(), datetime.now(UTC)))
            writer.commit()

            board.wake()
            batch = await claim(connection, board)
    assert [row.topic for row in batch.rows] == ["orders.placed"]


async def test_after_the_sequence_is_set_back_messages_are_found(
    database_url: str,
) -> None:
    insert(database_url, *(Message("t", b"", key="same") for _ in range(3)))
    mark_published(database_url, "t")
    async with await connect(database_url, application_name="test") as connection:
        board = board_of_all_lanes()
        await claim(connection, board)
        execute(database_url, "ALTER SEQUENCE outbox.message_seq RESTART")
        insert(database_url, Message("again", b"", key="same"))

        batches = [await claim(connection, board_of_all_lanes())]
        board.wake(refresh=True)
        batches.append(await claim(connection, board))

    assert [[row.topic for row in batch.rows] for batch in batches] == [["again"]] * 2


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


async def test_lanes_where_a_claim_finds_only_other_topics_are_idle(
    database_url: str,
) -> None:
    with administration(database_url, application_name="test") as administrator:
        add_reader(administrator, "invoices", ["invoices"], broker="redis://b")
    board = board_of_all_lanes("invoices")
    async with await connect(database_url, application_name="test") as connection:
        await claim(connection, board)
        for _ in range(3):
            insert(database_url, Message("orders", b"", key="k"))
            board.wake()
            batch = await claim(connection, board)
            assert (batch.rows, board.pick()) == ([], [])

        insert(database_url, Message("invoices", b"", key="k"))
        board.wake()
        batch = await claim(connection, board)
    assert [row.topic for row in batch.rows] == ["invoices"]


async def test_once_a_relay_sees_a_new_topic_it_claims_what_its_lanes_have_passed(
    unread_database_url: str,
) -> None:
    url = unread_database_url
    with administration(url, application_name="test") as administrator:
        add_reader(administrator, "invoices", ["invoices"], broker="redis://b")
    board = board_of_all_lanes("invoices")
    reader = RelayReader("invoices", "redis://b", ScriptedPublisher())
    reader.on_topics = board.take_over
    async with await connect(url, application_name="test") as connection:
        assert await reader.may_read(connection)
        insert(url, Message("orders", b"", key="k"))
        assert (await claim(connection, board)).rows == []
        execute(url, SUBSCRIBE)
        board.wake(refresh=True)
        assert (await claim(connection, board)).rows == []
        assert await reader.may_read(connection)
        batch = await claim(connection, board)
    assert [row.topic for row in batch.rows] == ["orders"]


@pytest.mark.parametrize("others", [0, 10**6])
async def test_messages_of_other_topics_take_no_place_in_a_batch(
    database_url: str, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """However many a claim passes, it ends before a seq that rows share."""
    monkeypatch.setattr("pillarbox.outbox.log.claim._MOST_OTHERS", others)
    with administration(database_url, application_name="test") as administrator:
        add_reader(administrator, "invoices", ["invoices"], broker="redis://b")
    execute(database_url, "SELECT setval('outbox.message_seq', 1000)")
    topics = {
        seq: "invoices" if seq in {7, 40, 41, 42, 90} else "orders"
        for seq in range(1, 100)
    }
    twins = dict.fromkeys([5, 11, 16, 17, 41], "invoices")
    for seq, topic in [*topics.items(), *twins.items()]:
        execute(database_url, WITH_SEQ, (seq, topic, str(seq).encode()))
    expected = sorted([7, 40, 41, 42, 90, *twins])

    board = board_of_all_lanes("invoices")
    config = RelayConfig(batch_size=4)
    async with await connect(database_url, application_name="test") as connection:
        batch = await claim(connection, board, config)
    if others:
        assert [row.seq for row in batch.rows] == expected[:4]

    publisher = ScriptedPublisher()
    async with running(
        database_url, publisher, reader="invoices", broker="redis://b", batch_size=4
    ):
        await publisher.until_acked(len(expected))
        insert(database_url, Message("invoices", b"last", key="k"))
        await publisher.until_acked(len(expected) + 1)
    payloads = [message.payload for call in publisher.calls for message in call]
    assert payloads == [*(str(seq).encode() for seq in expected), b"last"]


async def test_rows_behind_a_message_that_fills_a_claim_are_found_after_a_late_commit(
    database_url: str,
) -> None:
    publisher = ScriptedPublisher()
    async with running(database_url, publisher, max_batch_bytes=2000):
        with psycopg.connect(conninfo(database_url)) as writer:
            for _ in range(3):
                writer.execute(LARGE)
            insert(database_url, Message("first", b"", key="k"))
            await publisher.until_acked(1)
            writer.commit()
        await publisher.until_acked(4)
    assert unsettled(database_url) == 0


def board_of_all_lanes(reader: str = MAIN) -> LaneBoard:
    numbers = [number for priority in PRIORITIES for number in lanes_of(priority)]
    board = LaneBoard(HeldLease(numbers), 1, reader)
    board.take(numbers)
    return board


async def claim(
    connection: Connection, board: LaneBoard, config: RelayConfig | None = None
) -> ClaimedBatch:
    lanes = board.pick()
    batch = await claim_batch(connection, board, lanes, config or RelayConfig())
    board.put_back(lanes)
    return batch
