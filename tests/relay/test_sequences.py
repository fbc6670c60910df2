"""Sequences that somebody sets back, makes again, or gives other properties."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import psycopg
import pytest

from pillarbox import Message, uuid7
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.lane import Priority, lane_of
from pillarbox.outbox.postgres.connection import connect, conninfo
from pillarbox.relay.events import BatchSettled
from pillarbox.relay.publisher import Nacked
from tests.fixtures.positions import REPLAY
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import (
    PATIENT,
    Running,
    defer,
    insert,
    mark_published,
    running,
    unsettled,
)
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.relay.test_claim import board_of_all_lanes, claim

RARELY = timedelta(hours=1)
AGAIN = "SELECT outbox.add('again', '{}'::jsonb, key => 'k')"
NEIGHBOUR = next(  # a key of the same lane
    key
    for key in map(str, range(1000))
    if lane_of(key, uuid7(), Priority.DEFAULT)
    == lane_of("k", uuid7(), Priority.DEFAULT)
)
SET_BACK = (
    "SELECT setval('outbox.message_seq', last_value - {}) FROM outbox.message_seq"
)
MANY = " FROM generate_series(1, {})"
FALLS = {
    "restarted": "ALTER SEQUENCE outbox.message_seq RESTART",
    "set back": "SELECT setval('outbox.message_seq', 3)",
    "restarted, and soon as far as before": (
        f"ALTER SEQUENCE outbox.message_seq RESTART; {AGAIN};"
        " SELECT setval('outbox.message_seq', 1000)"
    ),
    "made again": (
        "CREATE SEQUENCE outbox.other;"
        " ALTER TABLE outbox.message ALTER seq SET DEFAULT nextval('outbox.other');"
        " ALTER TABLE outbox.message_template ALTER seq DROP DEFAULT;"
        " ALTER TABLE outbox.subscription ALTER since_seq SET DEFAULT 0;"
        " DROP SEQUENCE outbox.message_seq;"
        " ALTER SEQUENCE outbox.other RENAME TO message_seq;"
        f" {AGAIN}; SELECT setval('outbox.message_seq', 1000)"
    ),
    "restarted with its table": (
        "ALTER SEQUENCE outbox.message_seq OWNED BY outbox.message.seq;"
        " TRUNCATE outbox.message RESTART IDENTITY"
    ),
}
CHANGES = (
    *("CACHE 50", "CYCLE", "INCREMENT 2", "INCREMENT -1 MINVALUE -9"),
    *("MAXVALUE 1000", "START 7", "AS integer"),
)


async def refusal(relay: Running) -> str:
    """Wait until a running relay ends by itself, and return why."""
    await asyncio.wait({relay.task})
    error = relay.task.exception()
    assert isinstance(error, ExceptionGroup)
    assert isinstance(error.exceptions[0], ConfigError)
    return str(error.exceptions[0])


async def settle(url: str, publisher: ScriptedPublisher, count: int) -> None:
    """Publish so many messages, and let a claim begin while nothing else goes on."""
    insert(url, *again(count - 1))
    await publisher.until_acked(count - 1)
    await asyncio.to_thread(wait_for, "settled", lambda: not unsettled(url))
    insert(url, *again(1))
    await publisher.until_acked(count)


def again(count: int = 5) -> Sequence[Message]:
    return [Message("again", b"", key="k") for _ in range(count)]


@pytest.mark.parametrize("fall", FALLS)
async def test_a_claim_finds_what_was_added_after_the_sequence_fell(
    fall: str, database_url: str
) -> None:
    insert(database_url, *(Message("t", b"", key="k") for _ in range(40)))
    mark_published(database_url, "t")
    async with await connect(database_url, application_name="test") as connection:
        board = board_of_all_lanes()
        await claim(connection, board)
        execute(database_url, FALLS[fall])
        insert(database_url, *again())
        board.wake()
        rows = (await claim(connection, board)).rows

    query = "SELECT count(*) FROM outbox.message WHERE topic = 'again'"
    assert execute(database_url, query) == [(len(rows),)]
    assert {row.topic for row in rows} == {"again"}


@pytest.mark.long
async def test_each_time_that_the_sequence_falls_messages_are_published(
    database_url: str,
) -> None:
    publisher = ScriptedPublisher()
    async with running(database_url, publisher, sweep_interval=RARELY):
        for turn in range(1, 4):
            for _ in range(5):
                insert(database_url, *again(6))
            await publisher.until_acked(turn * 30)
            execute(database_url, "ALTER SEQUENCE outbox.message_seq RESTART")
    assert unsettled(database_url) == 0


@pytest.mark.parametrize("by", [1, 3, 100, 400])
async def test_a_sequence_that_falls_and_catches_up_before_a_claim_loses_nothing(
    by: int, database_url: str
) -> None:
    publisher = ScriptedPublisher()
    async with running(database_url, publisher, sweep_interval=RARELY):
        await settle(database_url, publisher, 500)
        # Only the commit wakes the relay.
        execute(database_url, f"{SET_BACK.format(by)}; {AGAIN}{MANY.format(by + 5)}")
        await publisher.until_acked(505 + by)
    assert len(publisher.topics()) == 505 + by
    assert unsettled(database_url) == 0


async def test_a_look_that_comes_with_the_first_claim_after_a_fall_loses_nothing(
    database_url: str,
) -> None:
    insert(database_url, *(Message("t", b"", key="k") for _ in range(400)))
    mark_published(database_url, "t")
    async with await connect(database_url, application_name="test") as connection:
        board = board_of_all_lanes()
        await claim(connection, board)
        execute(database_url, f"{SET_BACK.format(300)}; {AGAIN}{MANY.format(310)}")
        board.wake(refresh=True)
        rows = (await claim(connection, board)).rows
    assert len(rows) == 310


async def test_a_number_assigned_again_is_found_when_it_commits_late(
    database_url: str,
) -> None:
    publisher = ScriptedPublisher()
    with psycopg.connect(conninfo(database_url)) as slow:
        async with running(database_url, publisher, sweep_interval=RARELY):
            await settle(database_url, publisher, 50)
            slow.execute(SET_BACK.format(9))
            slow.execute(
                "SELECT outbox.add('late', '{}'::jsonb, key => %s)", [NEIGHBOUR]
            )
            execute(database_url, AGAIN + MANY.format(20))
            await publisher.until_acked(70)
            insert(database_url, *again(300))
            await publisher.until_acked(370)
            slow.commit()
            await publisher.until_acked(371)
    assert publisher.topics()[-1] == "late"


async def test_more_late_messages_than_a_batch_takes_are_published_once(
    database_url: str,
) -> None:
    publisher = ScriptedPublisher()
    async with running(database_url, publisher, batch_size=10, sweep_interval=RARELY):
        insert(database_url, *again(60))
        await publisher.until_acked(60)
        execute(database_url, "ALTER SEQUENCE outbox.message_seq RESTART")
        insert(database_url, *again(50))
        await publisher.until_acked(110)
        insert(database_url, Message("last", b"", key="k"))
        await publisher.until_acked(111)
    assert publisher.topics() == [*["again"] * 110, "last"]


async def test_a_transaction_that_was_open_while_the_sequence_fell_is_found(
    database_url: str,
) -> None:
    publisher = ScriptedPublisher()
    with psycopg.connect(conninfo(database_url)) as slow:
        async with running(database_url, publisher, sweep_interval=RARELY):
            insert(database_url, *again(20))
            await publisher.until_acked(20)
            slow.execute("SELECT pg_current_xact_id()")
            execute(database_url, "SELECT setval('outbox.message_seq', 1, false)")
            slow.execute("SELECT outbox.add('late', '{}'::jsonb, key => 'l')")
            insert(database_url, *again(5))
            await publisher.until_acked(25)
            slow.commit()
            await publisher.until_acked(26)
    assert publisher.topics()[-1] == "late"


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["message_seq", "deferral_entry_seq"])
async def test_a_relay_refuses_a_sequence_with_other_properties(
    name: str, change: str, database_url: str
) -> None:
    execute(database_url, f"ALTER SEQUENCE outbox.{name} {change}")
    with pytest.raises(ConfigError, match=rf"outbox\.{name} .* run pillarbox migrate"):
        async with running(database_url, ScriptedPublisher()):
            pass


async def test_a_running_relay_stops_before_it_misses_what_a_cache_numbers(
    database_url: str,
) -> None:
    publisher = ScriptedPublisher()
    with psycopg.connect(conninfo(database_url), autocommit=True) as first:
        async with running(database_url, publisher, sweep_interval=RARELY) as relay:
            insert(database_url, *again(3))
            await publisher.until_acked(3)
            execute(database_url, "ALTER SEQUENCE outbox.message_seq CACHE 50")
            first.execute(AGAIN)
            insert(database_url, *again(1))
            assert "message_seq was altered" in await refusal(relay)
        first.execute(AGAIN)
    execute(database_url, "ALTER SEQUENCE outbox.message_seq CACHE 1")
    async with running(database_url, publisher):
        await publisher.until_acked(6)
    assert unsettled(database_url) == 0


@pytest.mark.parametrize("fall", ["RESTART", "RESTART WITH 4"])
async def test_a_relay_adds_no_entries_that_rank_below_earlier_ones(
    fall: str, database_url: str
) -> None:
    insert(database_url, *again(9))
    defer(database_url, "again")
    execute(database_url, f"ALTER SEQUENCE outbox.deferral_entry_seq {fall}")
    async with running(database_url, ScriptedPublisher()) as relay:
        assert "deferral_entry_seq was set back below 9" in await refusal(relay)


async def test_a_running_relay_notices_that_entries_begin_again(
    database_url: str,
) -> None:
    publisher = ScriptedPublisher(lambda _: Nacked("no"))
    async with running(database_url, publisher, retry=PATIENT) as relay:
        insert(database_url, *again(9))
        await relay.events.wait_for(BatchSettled)
        execute(database_url, "SELECT setval('outbox.deferral_entry_seq', 2)")
        assert "deferral_entry_seq was set back below" in await refusal(relay)


async def test_a_replay_is_found_although_entries_have_begun_again(
    database_url: str,
) -> None:
    publisher = ScriptedPublisher()
    insert(database_url, *again(9))
    defer(database_url, "again", due_in=timedelta(0))
    async with running(database_url, publisher):
        await publisher.until_acked(9)
        execute(
            database_url,
            "ALTER SEQUENCE outbox.deferral_entry_seq RESTART;"
            f" {REPLAY} ORDER BY seq DESC LIMIT 1;"
            " SELECT setval('outbox.deferral_entry_seq', 1000)",
        )
        await publisher.until_acked(10)
