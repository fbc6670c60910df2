"""The sweep finds due messages, rows inserted by hand, and rows without a mark."""

import asyncio
from datetime import timedelta

import psycopg
import pytest

import relay.claim
from outbox import Message, Priority
from outbox.lane import PRIORITIES, lanes_of
from outbox.postgres.connection import Link
from relay.config import RelayConfig
from relay.events import BatchSettled
from relay.lanes.board import LaneBoard
from relay.publisher import Acked, Nacked
from relay.sweep import sweep_lanes
from tests.fixtures.claimed import HeldLease
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import defer, insert, running, unsettled
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
    board = LaneBoard(HeldLease(numbers), config.weights, config.concurrency)
    board.take(numbers)
    lanes = [lane for number in numbers if (lane := board.find(number))]
    for lane in lanes:
        lane.deferrals.note_created(lane.oldest)
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
                assert len(lane.deferrals.due) <= 30
                found |= set(lane.deferrals.due)
                lane.deferrals.took(list(lane.deferrals.due))
            for lane in picked:
                lane.found_empty()
            board.put_back(picked)
            board.ask_for_due()
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)

    assert len(found) == 800


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


async def test_a_message_whose_mark_was_lost_in_a_crash_is_published_again(
    database_url: str,
) -> None:
    publisher = ScriptedPublisher()

    # A crash loses no mark that a sweep has verified, so no sweep may run first.
    never = timedelta(hours=1)
    async with running(database_url, publisher, sweep_interval=never) as relay:
        # In different lanes, because a mark covers the messages of one lane.
        lost, kept = Message("lost", b""), Message("kept", b"", priority=Priority.BULK)
        insert(database_url, lost, kept)
        await publisher.until_acked(2)
        await relay.events.wait_for(BatchSettled, 2)
        execute(
            database_url,
            "DELETE FROM outbox.settlement s USING outbox.message m"
            " WHERE m.topic = 'lost' AND m.id = ANY (s.ids)",
        )
        execute(
            database_url,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database()"
            "   AND application_name LIKE 'pillarbox relay%'",
        )
        await publisher.until_acked(3)

    assert publisher.topics()[2:] == ["lost"]
    assert unsettled(database_url) == 0


async def test_a_relay_that_stops_raises_its_watermarks(database_url: str) -> None:
    publisher = ScriptedPublisher(
        lambda message: Nacked("no") if message.topic == "k/7" else Acked()
    )
    async with running(database_url, publisher, batch_size=4) as relay:
        insert(database_url, *[Message(f"k/{n}", b"", key="k") for n in range(10)])
        await publisher.until_acked(7)
        await relay.events.wait_for(BatchSettled, 3)

    # Waiting messages have a mark, too.
    assert execute(
        database_url, "SELECT max(up_to), sum(messages) FROM outbox.watermark"
    ) == [(10, 10)]


async def test_a_row_inserted_by_hand_below_the_watermark_is_found(
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


@pytest.mark.parametrize("step", ["_verify", "_raise_watermarks"])
async def test_a_claim_that_fails_while_raising_watermarks_loses_no_message(
    step: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(relay.claim, step)
    failures = iter([True] * 3)

    async def fail(*arguments: object) -> object:
        if next(failures, False):
            raise psycopg.OperationalError("the connection was cut")
        return await original(*arguments)

    monkeypatch.setattr(relay.claim, step, fail)
    insert(database_url, *[Message(f"k/{n}", b"", key="k") for n in range(20)])
    publisher = ScriptedPublisher()
    async with running(database_url, publisher, batch_size=7):
        await publisher.until_acked(20)

    assert publisher.of_key("k") == [f"k/{n}" for n in range(20)]
    assert unsettled(database_url) == 0
