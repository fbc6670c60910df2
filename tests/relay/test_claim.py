"""A claim while somebody else settles."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

import relay.claim
from outbox import Message, uuid7
from outbox.lane import PRIORITIES, Priority, lane_of, lanes_of
from outbox.postgres.connection import Connection, connect, conninfo
from relay.claim import Batch, claim_batch
from relay.config import RelayConfig
from relay.lanes.board import LaneBoard
from relay.settle import mark_published
from tests.fixtures.claimed import HeldLease
from tests.fixtures.limits import lift_limits
from tests.fixtures.relay import execute, insert

NACK = """
    UPDATE outbox.message SET attempts = 1, available_at = now() + interval '1 hour'
     WHERE topic = 'head'
"""

INSERT = """
    INSERT INTO outbox.message (id, created_at, lane, topic, key, content_type, payload)
    VALUES (%s, %s, outbox.lane_of('k', outbox.uuid7(), 'default'), 'orders.placed',
            'k', 'text/plain', '')
"""


@pytest.mark.parametrize("moment", ["_list_blocked_keys", "_refresh"])
async def test_a_nack_that_is_settled_late_does_not_let_the_key_go_on_without_its_head(
    moment: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert(database_url, Message("head", b"", key="k"), Message("next", b"", key="k"))
    original = getattr(relay.claim, moment)

    async def interrupted(*arguments: object) -> object:
        result = await original(*arguments)
        with psycopg.connect(conninfo(database_url)) as late:
            late.execute(NACK)
        return result

    monkeypatch.setattr(relay.claim, moment, interrupted)
    async with await connect(database_url, application_name="test") as connection:
        batch = await claim(connection, board_of_all_lanes())

    assert [row.topic for row in batch.rows] == ["head", "next"]


async def test_messages_passed_while_their_key_was_blocked_come_first(
    database_url: str,
) -> None:
    board = board_of_all_lanes()
    with psycopg.connect(conninfo(database_url)) as late:
        late.execute(INSERT, (uuid7(), datetime.now(UTC)))
        insert(database_url, Message("head", b"", key="k"))
        async with await connect(database_url, application_name="test") as connection:
            (head,) = (await claim(connection, board)).rows
            execute(database_url, NACK)
            lane = board.find(head.lane)
            assert lane is not None
            lane.block("k", head.created_at, most=100)
            late.commit()
            # The floor rises over it, for claims leave its key out.
            beside = Message("beside", b"", key=key_of_lane(head.lane))
            for _ in range(3):
                insert(database_url, replace(beside, id=uuid7()))
                batch = await claim(connection, board)
                assert [row.topic for row in batch.rows] == ["beside"]
                await mark_published(connection, batch.rows)
            assert lane.floor > head.seq
            insert(database_url, Message("next", b"", key="k"))
            execute(database_url, "UPDATE outbox.message SET available_at = NULL")
            lane.free(head.seq, "k", head.created_at, refused=True)

            board.wake()
            batch = await claim(connection, board)

    assert [row.topic for row in batch.rows] == ["orders.placed", "head", "next"]


def key_of_lane(lane: int) -> str:
    """Another key of the same lane as `k`."""
    keys = (f"k{n}" for n in range(10_000))
    return next(key for key in keys if lane_of(key, uuid7(), Priority.DEFAULT) == lane)


async def test_a_transaction_that_wrote_hours_ago_is_seen_as_soon_as_it_commits(
    database_url: str,
) -> None:
    board = board_of_all_lanes()
    with psycopg.connect(conninfo(database_url)) as writer:
        # It began before the relay did.
        writer.execute(INSERT, (uuid7(), datetime.now(UTC) - timedelta(hours=5)))
        async with await connect(database_url, application_name="test") as connection:
            assert not (await claim(connection, board)).rows
            writer.commit()

            board.wake()
            assert len((await claim(connection, board)).rows) == 1


async def test_with_nothing_open_a_claim_looks_back_an_hour(database_url: str) -> None:
    board = board_of_all_lanes()
    async with await connect(database_url, application_name="test") as connection:
        await claim(connection, board)

    oldest, _ = board.bounds([lane for n in board.numbers() if (lane := board.find(n))])
    assert timedelta(minutes=59) < datetime.now(UTC) - oldest < timedelta(minutes=70)


async def test_large_headers_are_read_by_the_claim_that_loads_them_and_few_before(
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
        # All of them in the end, and in each claim some.
        while loaded < 124:
            board.wake()
            found = len((await claim(connection, board)).rows)
            assert found > 0
            loaded += found
            # Of all that is ready the server looks at no more than this.
            worth_reading = board.rows_worth_reading(RelayConfig().batch_size)
            assert worth_reading <= max(16, 2 * (found + 1))


@pytest.mark.parametrize("megabytes", [2, 30])
async def test_headers_that_take_long_to_decompress_are_not_moved_with_the_batch(
    megabytes: int, database_url: str
) -> None:
    lift_limits(database_url)
    insert(database_url, Message("large", b"", headers={"h": "v"}))
    # Compressed to less than a hundredth of that.
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
