"""Relays and consumers make missing days: a forgotten scheduler refuses no order."""

import asyncio
from typing import Any, Final

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pillarbox import Consumer, Message, add, insert_statement
from pillarbox.inbox.events import MessageHandled
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.errors import MissingPartitionError
from pillarbox.outbox.events import Event
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.postgres.days import Days, PartitionsNotMade
from pillarbox.outbox.testing.postgres import PostgresServer
from pillarbox.relay.events import BatchPublished, RelayStarted
from tests.acceptance.relays import as_role
from tests.fixtures.consumers import async_sessions_of
from tests.fixtures.consumers import running as running_consumer
from tests.fixtures.postgres import migrate, one_at_a_time
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import running as running_relay
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.outbox.administration.test_upkeep import TABLES

FORGET: Final = """
DO $$
DECLARE
    x record;
BEGIN
    FOR x IN SELECT p.parent_table AS parent, q.partition
               FROM outbox.partition_policy p, outbox.partitions(p.parent_table) q
              WHERE q.ends_at > now()
    LOOP
        EXECUTE format('ALTER TABLE %s DETACH PARTITION %s', x.parent, x.partition);
        EXECUTE format('DROP TABLE %s', x.partition);
    END LOOP;
    UPDATE outbox.upkeep SET awaited_at = now() - interval '9 days';
END
$$
"""
"""Nine days have passed since the migration, and nothing has run the upkeep."""
COVERED: Final = (
    "SELECT p.parent_table, max(x.ends_at) >= now() + %s * interval '1 day'"
    "  FROM outbox.partition_policy p, outbox.partitions(p.parent_table) x"
    " WHERE x.ends_at > now() GROUP BY 1 ORDER BY 1"
)
ADD: Final = "SELECT outbox.add('orders.placed', '{}'::jsonb)"


async def ignore(session: AsyncSession, message: Message) -> None: ...


def make_days(url: str) -> list[tuple[Any, ...]]:
    url = f"{url}?options=-crole%3Dpillarbox_relay"
    return execute(url, "SELECT * FROM outbox.make_days()")


def are_made(url: str) -> bool:
    return execute(url, COVERED, (1,)) == [(table, True) for table in sorted(TABLES)]


@pytest.fixture
def forgotten_url(database_url: str) -> str:
    execute(database_url, FORGET)
    with pytest.raises(psycopg.errors.CheckViolation):
        execute(database_url, ADD)
    return database_url


async def test_a_relay_makes_them_at_its_start(forgotten_url: str) -> None:
    url = as_role(forgotten_url, "pillarbox_relay")
    async with running_relay(url, ScriptedPublisher()) as relay:
        await asyncio.to_thread(wait_for, "days", lambda: are_made(forgotten_url))
        execute(forgotten_url, ADD)
        await relay.events.wait_for(BatchPublished)

    assert relay.events.of(PartitionsNotMade) == []
    # It is no upkeep.
    assert execute(forgotten_url, "SELECT succeeded_at FROM outbox.upkeep") == [(None,)]


async def test_a_consumer_makes_them_before_its_first_message(
    forgotten_url: str,
) -> None:
    source = MemorySource(Message("orders.placed", 1))
    async with async_sessions_of(as_role(forgotten_url, "pillarbox_consumer")) as it:
        consumer = Consumer(source, it, name="billing")
        consumer.handles("orders.placed")(ignore)
        async with running_consumer(consumer) as events:
            await events.wait_for(MessageHandled)


async def test_a_relay_that_can_make_none_says_so_and_goes_on(
    database_url: str,
) -> None:
    execute(database_url, FORGET)
    execute(
        database_url,
        "REVOKE EXECUTE ON FUNCTION outbox.make_days() FROM pillarbox_relay",
    )
    url = as_role(database_url, "pillarbox_relay")
    async with running_relay(url, ScriptedPublisher()) as relay:
        (failed,) = await relay.events.wait_for(PartitionsNotMade)
        await relay.events.wait_for(RelayStarted)

    assert "permission denied for function make_days" in failed.reason


async def test_days_are_made_again_every_hour_and_a_failure_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[list[tuple[str, str]]] = [[("a lock", "wait")], [], []]
    pauses: list[float] = []

    async def make() -> list[tuple[str, str]]:
        return answers.pop(0)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if not answers:
            raise asyncio.CancelledError

    monkeypatch.setattr("pillarbox.outbox.postgres.days.asyncio.sleep", sleep)
    heard: list[Event] = []
    days = Days(make, heard.append)
    await days.make()
    with pytest.raises(asyncio.CancelledError):
        await days.keep()

    assert heard == [PartitionsNotMade(reason="a lock", remedy="wait")]
    first, *later = pauses
    assert 54 <= first <= 60
    assert all(3240 <= pause <= 3600 for pause in later)


def test_the_days_of_dropped_receipts_stay_closed_to_them(forgotten_url: str) -> None:
    execute(
        forgotten_url,
        "INSERT INTO outbox.dropped_partition"
        " (parent_table, starts_at, ends_at, newest)"
        " SELECT 'inbox.receipt', d, d + interval '1 day', d + interval '1 second'"
        "   FROM outbox.begin_of('1 day', now()) AS d",
    )

    make_days(forgotten_url)

    assert execute(
        forgotten_url,
        "SELECT count(*) FROM pg_constraint"
        " WHERE conname LIKE 'not_forgotten_%' AND conrelid IN"
        "   (SELECT partition FROM outbox.partitions('inbox.receipt'))",
    ) == [(1,)]


def test_the_days_of_an_upkeep_at_work_are_left_to_it(forgotten_url: str) -> None:
    lock = "hashtextextended('outbox.make_partitions outbox.position', 0)"
    with psycopg.connect(forgotten_url) as upkeep:
        upkeep.execute(f"SELECT pg_advisory_xact_lock({lock})")

        assert make_days(forgotten_url) == []

    covered = [table for table, _ in execute(forgotten_url, COVERED, (0,))]
    assert "outbox.message" not in covered
    assert "outbox.deferral" not in covered
    assert "inbox.receipt" in covered


def test_a_locked_table_is_reported_and_the_others_get_their_days(
    forgotten_url: str,
) -> None:
    with psycopg.connect(forgotten_url) as session:
        session.execute("LOCK TABLE outbox.message IN ACCESS EXCLUSIVE MODE")

        ((problem, remedy),) = make_days(forgotten_url)

    assert problem.startswith("no partitions of outbox.message: ")
    assert remedy == ("a transaction keeps the table locked: pillarbox doctor names it")
    covered = [table for table, _ in execute(forgotten_url, COVERED, (1,))]
    assert covered == [
        t for t in sorted(TABLES) if not t.startswith("outbox.") or "letter" in t
    ]


def drop_all(url: str, which: str = "true") -> None:
    """Drop the partitions of all tables, or those that fulfill a condition."""
    execute(
        url,
        "DO $$ DECLARE x record; BEGIN"
        " FOR x IN SELECT parent_table AS t, q.partition FROM outbox.partition_policy,"
        f"   outbox.partitions(parent_table) q WHERE {which} LOOP"
        "   EXECUTE format('DROP TABLE %s', x.partition);"
        " END LOOP; END $$",
    )


def test_a_long_transaction_of_a_writer_neither_waits_nor_hinders(
    forgotten_url: str,
) -> None:
    make_days(forgotten_url)
    drop_all(forgotten_url, "q.starts_at > now()")
    with psycopg.connect(forgotten_url) as writer:
        writer.execute(ADD)

        assert make_days(forgotten_url) == []

        writer.execute(ADD)


def test_a_clock_at_which_nothing_ever_ran_makes_no_days(forgotten_url: str) -> None:
    drop_all(forgotten_url)
    for years in (-2, 2):
        execute(
            forgotten_url,
            "UPDATE outbox.upkeep SET awaited_at = now() - %s * interval '1 year'",
            (years,),
        )

        ((problem, remedy),) = make_days(forgotten_url)

        assert problem.startswith("the server's clock says "), years
        assert "pillarbox maintain --accept-clock" in remedy
        assert execute(forgotten_url, COVERED, (0,)) == []

    execute(forgotten_url, "SELECT outbox.accept_clock()")
    assert make_days(forgotten_url) == []
    execute(forgotten_url, ADD)


def test_without_pg_cron_a_migration_makes_30_days_or_as_many_as_were_asked_for(
    server: PostgresServer, database_url: str
) -> None:
    with one_at_a_time(server):
        migrate(database_url, with_cron=False, days_ahead=10)
        for days, is_covered in ((9, True), (11, False)):
            assert execute(database_url, COVERED, (days,)) == [
                (t, is_covered) for t in sorted(TABLES)
            ]
        migrate(database_url, with_cron=False)

    assert execute(database_url, COVERED, (30,)) == [(t, True) for t in sorted(TABLES)]
    gaps = "SELECT max(gaps) FROM outbox.partition_health"
    assert execute(database_url, gaps) == [(0,)]


async def test_a_writer_that_finds_no_partition_hears_the_remedy(
    forgotten_url: str,
) -> None:
    refused = pytest.raises(MissingPartitionError, match="run pillarbox maintain")
    message = Message("orders.placed", 1)
    for driver in ("psycopg", "psycopg2"):
        url = sqlalchemy_url(forgotten_url).replace("psycopg", driver, 1)
        engine = create_engine(url)
        for messages in ([message], [message, Message("orders.placed", 2)]):
            with Session(engine) as session:
                add(session, *messages)
                with refused:
                    session.commit()
        with engine.connect() as connection, refused:
            connection.execute(insert_statement(message))
        engine.dispose()
    for driver in ("psycopg", "asyncpg"):
        async with (
            async_sessions_of(forgotten_url, driver) as sessions,
            sessions() as async_session,
        ):
            add(async_session, message)
            with refused:
                await async_session.commit()
