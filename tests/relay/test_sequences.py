"""Sequences that somebody sets back, makes again, or gives other properties."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import psycopg
import pytest

from outbox.errors import ConfigError
from outbox.postgres.connection import connect, conninfo
from pillarbox import Message
from relay.events import BatchSettled
from relay.publisher import Nacked
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
from tests.relay.test_claim import board_of_all_lanes, claim

RARELY = timedelta(hours=1)
AGAIN = "SELECT outbox.add('again', '{}'::jsonb, key => 'k')"
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
