"""The sweep finds due messages, and rows inserted by hand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from typing_extensions import override

import pillarbox.outbox.log.claims
from pillarbox import Message
from pillarbox.outbox.lane import PRIORITIES, lanes_of
from pillarbox.outbox.log.lanes.board import LaneBoard
from pillarbox.outbox.log.lanes.keys import LONG_AGO
from pillarbox.outbox.log.lanes.lane import Lane
from pillarbox.outbox.log.sweep import _find_due, sweep_lanes
from pillarbox.outbox.postgres.connection import Connection, Link, conninfo
from pillarbox.relay.config import RelayConfig
from pillarbox.relay.events import BatchSettled
from tests.fixtures.claimed import HeldLease
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import defer, insert, numbered, running, unsettled
from tests.fixtures.sessions import execute

FILL = """
INSERT INTO outbox.message (id, lane, topic, content_type, payload)
SELECT outbox.uuid7(), 16 + n % 8, 'due', 'text/plain', ''
  FROM generate_series(1, 800) AS n
"""


async def test_a_batch_of_each_lane_is_found_and_more_on_request(
    database_url: str,
) -> None:
    execute(database_url, FILL)
    defer(database_url, "due", due_in=timedelta(seconds=-1))
    numbers = [number for priority in PRIORITIES for number in lanes_of(priority)]
    # The first poll finds everything: there is no second.
    config = RelayConfig(batch_size=30, poll_interval=timedelta(hours=1))
    board = LaneBoard(HeldLease(numbers), config.concurrency)
    board.take(numbers)
    lanes = [lane for number in numbers if (lane := board.find(number))]
    for lane in lanes:
        lane.keys.note_created(LONG_AGO)
    link = Link(database_url, application_name="test")
    found: set[object] = set()

    async with asyncio.timeout(60):
        sweeping = asyncio.create_task(
            sweep_lanes(board, link, config, lambda event: None)
        )
        while len(found) < 800:
            await board.work()
            picked = board.pick()
            for lane in lanes:
                assert len(lane.keys.due) <= 30
                found |= set(lane.keys.due)
                for id in list(lane.keys.due):
                    del lane.keys.due[id]
            Lane.found_empty(picked)
            board.put_back(picked)
            board.ask_for_due()
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)

    assert len(found) == 800


async def test_a_search_for_due_messages_says_nothing_of_a_lane_taken_over_meanwhile(
    database_url: str,
) -> None:
    board = LaneBoard(HeldLease([16]), 1)
    board.take([16])
    (lane,) = board.pick()

    def know_of_a_message() -> None:
        lane.keys.note_created(LONG_AGO)
        lane.keys.expect(datetime.now(UTC))

    class TakenOver(Link):
        @asynccontextmanager
        @override
        async def use(
            self, only: Connection | None = None
        ) -> AsyncIterator[Connection]:
            async with super().use(only) as connection:
                yield connection
            lane.doubt()
            know_of_a_message()

    know_of_a_message()
    link = TakenOver(database_url, application_name="test")
    await _find_due(link, board, 30, timedelta(seconds=1))
    await link.close()

    assert lane.keys.due_up_to == (LONG_AGO, -1)


async def test_a_message_that_is_stored_during_a_search_is_searched_for_again(
    database_url: str,
) -> None:
    board = LaneBoard(HeldLease([]), 1)
    board.searched_at = datetime.now(UTC)

    class Stored(Link):
        @asynccontextmanager
        @override
        async def use(
            self, only: Connection | None = None
        ) -> AsyncIterator[Connection]:
            async with super().use(only) as connection:
                yield connection
            board.expect_due([datetime.now(UTC) + timedelta(seconds=0.5)])

    link = Stored(database_url, application_name="test")
    await _find_due(link, board, 30, timedelta(seconds=1))
    await link.close()

    async with asyncio.timeout(10):
        await board.wants_due()


async def test_a_message_is_claimed_at_its_moment_and_not_at_the_next_poll(
    database_url: str,
) -> None:
    publisher = ScriptedPublisher()

    async with running(database_url, publisher, poll_interval=timedelta(hours=1)):
        for due_in in (0.3, 1.5):
            due_at = datetime.now(UTC) + timedelta(seconds=due_in)
            topic = f"in {due_in} s"
            insert(database_url, Message(topic, b"", available_at=due_at))
            await publisher.until_acked(1 if due_in < 1 else 2)
            assert datetime.now(UTC) >= due_at


@pytest.mark.week
async def test_a_message_inserted_by_hand_for_another_day_is_found(
    database_url: str,
) -> None:
    publisher = ScriptedPublisher()

    async with running(database_url, publisher) as relay:
        insert(database_url, Message("today", b"", key="k"))
        await publisher.until_acked(1)
        await relay.events.wait_for(BatchSettled)
        for days in (-2, -1, 1, 2):
            execute(
                database_url,
                "INSERT INTO outbox.message"
                " (id, created_at, lane, topic, content_type, payload)"
                " SELECT outbox.uuid7(), now() + %s, lane, %s, 'text/plain', ''"
                "  FROM outbox.message WHERE topic = 'today'",
                (timedelta(days=days), f"in {days} days"),
            )
            insert(database_url, Message("today again", b"", key="k"))
        await publisher.until_acked(9)

    assert unsettled(database_url) == 0


async def test_a_row_inserted_by_hand_far_above_the_sequence_delays_no_other(
    database_url: str,
) -> None:
    publisher = ScriptedPublisher()

    async with running(database_url, publisher):
        insert(database_url, *[Message(f"k/{n}", b"", key="k") for n in range(3)])
        await publisher.until_acked(3)
        execute(
            database_url,
            "INSERT INTO outbox.message"
            " (id, seq, lane, topic, key, content_type, payload)"
            " SELECT outbox.uuid7(), 1000000000000, lane, 'far', 'k', 'text/plain', ''"
            "  FROM outbox.message WHERE topic = 'k/0'",
        )
        await publisher.until_acked(4)
        for n in range(3, 9):
            insert(database_url, Message(f"k/{n}", b"", key="k"))
            await publisher.until_acked(n + 2)

    assert [t for t in publisher.of_key("k") if t != "far"] == [
        f"k/{n}" for n in range(9)
    ]
    assert unsettled(database_url) == 0


async def test_a_row_inserted_by_hand_below_the_position_is_found(
    database_url: str,
) -> None:
    insert(database_url, *[Message(f"k/{n}", b"", key="k") for n in range(5)])
    publisher = ScriptedPublisher()
    async with running(database_url, publisher):
        await publisher.until_acked(5)
    async with running(
        database_url, publisher, sweep_interval=timedelta(milliseconds=20)
    ):
        execute(
            database_url,
            "INSERT INTO outbox.message (id, seq, lane, topic, content_type, payload)"
            " SELECT outbox.uuid7(), 3, lane, 'by hand', 'text/plain', ''"
            "  FROM outbox.message WHERE topic = 'k/0'",
        )
        await publisher.until_acked(6)

    assert publisher.topics()[-1] == "by hand"
    assert unsettled(database_url) == 0


async def test_a_late_row_far_below_the_position_is_found_before_later_ones_of_its_key(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pillarbox.outbox.log.claims, "FAR", 10)
    publisher = ScriptedPublisher()
    with psycopg.connect(conninfo(database_url)) as slow:
        async with running(
            database_url, publisher, sweep_interval=timedelta(hours=1)
        ) as relay:
            insert(database_url, Message("first", b"", key="k"))
            await publisher.until_acked(1)
            slow.execute("SELECT outbox.add('late', '{}'::jsonb, key => 'k')")
            for n in range(3):
                insert(database_url, *[Message(f"{n}", b"") for _ in range(30)])
                await publisher.until_acked(31 + 30 * n)
            await relay.events.wait_for(BatchSettled)
            slow.commit()
            insert(database_url, Message("last", b"", key="k"))
            await publisher.until_acked(93)

    assert publisher.of_key("k") == ["first", "late", "last"]
    assert unsettled(database_url) == 0


async def test_rows_of_a_default_partition_hold_up_no_others(
    database_url: str,
) -> None:
    ((yesterday, today),) = execute(
        database_url,
        "SELECT starts_at, ends_at FROM outbox.partitions('outbox.message')"
        " WHERE ends_at < now() ORDER BY starts_at DESC LIMIT 1",
    )
    execute(
        database_url,
        "DO $$ BEGIN EXECUTE (SELECT format('DROP TABLE %s', p.partition)"
        " FROM outbox.partitions('outbox.message') p"
        f" WHERE p.starts_at = '{yesterday}'); END $$",
    )
    execute(
        database_url,
        "CREATE TABLE outbox.message_default PARTITION OF outbox.message DEFAULT",
    )
    for topic, moment, count in (
        ("before", yesterday - timedelta(hours=1), 1),
        ("odd", today - timedelta(hours=1), 5),
    ):
        execute(
            database_url,
            "INSERT INTO outbox.message (id, created_at, lane, topic, content_type,"
            " payload) SELECT outbox.uuid7(), %s,"
            " outbox.lane_of('k', outbox.uuid7()), %s, 'c', ''"
            " FROM generate_series(1, %s)",
            (moment, topic, count),
        )
    publisher = ScriptedPublisher()
    async with running(database_url, publisher, batch_size=2):
        insert(database_url, *numbered("k", 3))
        await publisher.until_acked(4)

    assert publisher.topics() == ["before", "k/0", "k/1", "k/2"]
    assert unsettled(database_url) == 5
