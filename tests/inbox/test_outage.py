"""The consumer survives outages, and needs only the privileges of its role."""

import asyncio
from contextlib import suppress
from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from inbox.events import (
    ConsumerStarted,
    HandlerDatabaseLost,
    HandlerDatabaseRecovered,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
    SourceLost,
    SourceRecovered,
)
from inbox.sources.memory import MemorySource
from inbox.sources.postgres import InboxSource
from outbox.observability.health import Health
from outbox.observability.presence import PresenceNotRecorded
from outbox.testing.postgres import PostgresServer
from pillarbox import Consumer, DeadLetter, Message
from relay.publisher import Acked
from relay.publishers.postgres import PostgresPublisher
from tests.fixtures.consumers import (
    NEVER,
    async_sessions_of,
    consuming,
    is_plain,
    numbered,
    running,
)
from tests.fixtures.effects import EFFECTS, effects, note
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.sessions import execute
from tests.fixtures.urls import copy_of, with_options

END_LEASE = """
    SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity
     WHERE application_name LIKE 'pillarbox % inbox billing lease'
       AND datname = current_database()
"""


async def handle(session: AsyncSession, message: Message) -> None:
    await session.execute(text("SELECT 1"))


async def do_nothing(session: object, message: Message) -> None:
    pass


def do_nothing_plainly(session: object, message: Message) -> None:
    pass


async def test_an_unavailable_database_is_waited_for_and_costs_no_attempt(
    migrated_server: PostgresServer,
) -> None:
    url = migrated_server.url
    source = MemorySource()
    async with consuming(url, source, handle, retry=NEVER) as events:
        migrated_server.stop()
        source.add(*numbered(100, keys=10))
        await events.wait_for(HandlerDatabaseLost)
        migrated_server.start()
        await events.wait_for(MessageHandled, 100)
        await events.wait_for(HandlerDatabaseRecovered)
    assert events.of(HandlerFailed) == []
    assert len(source.acked) == 100


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "async pool"])
@pytest.mark.parametrize("fault", ["refuse", "stall"])
async def test_an_idle_consumer_notices_that_its_database_is_unavailable(
    database_url: str,
    proxy: MakeProxy,
    monkeypatch: pytest.MonkeyPatch,
    driver: str,
    fault: str,
) -> None:
    monkeypatch.setattr("outbox.observability.presence.INTERVAL", 0.1)
    monkeypatch.setattr("inbox.handlers.attempt.ANSWER_LIMIT", 4.0)
    between, url = proxy(database_url)
    handler = do_nothing_plainly if is_plain(driver) else do_nothing
    health = Health(ConsumerStarted)
    async with consuming(
        url, MemorySource(), handler, driver=driver, observers=[health]
    ) as events:
        assert health.waits_for == []
        getattr(between, fault)()
        lost, *_ = await events.wait_for(HandlerDatabaseLost)
        assert "check that the database is running" in lost.remedy
        missed, *_ = await events.wait_for(PresenceNotRecorded)
        assert missed.remedy == lost.remedy
        assert health.waits_for == ["database"]
        between.accept() if fault == "refuse" else between.resume()
        await events.wait_for(HandlerDatabaseRecovered)
        assert health.waits_for == []


async def test_a_consumer_that_only_cannot_record_itself_is_ready(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.observability.presence.INTERVAL", 0.1)
    async with consuming(database_url, MemorySource(), handle) as events:
        execute(database_url, "DROP TABLE inbox.process CASCADE")
        await events.wait_for(PresenceNotRecorded, 2)
        assert events.of(HandlerDatabaseLost) == []


async def test_a_restart_of_broker_and_database_loses_nothing(
    migrated_server: PostgresServer,
) -> None:
    url = migrated_server.url
    execute(url, EFFECTS)
    execute(url, "INSERT INTO inbox.subscription VALUES ('billing', 'orders')")
    await publish(url, *numbered(100, keys=10))
    started, restarted = asyncio.Event(), asyncio.Event()

    async def handle(session: AsyncSession, message: Message) -> None:
        if message.payload == b"50":
            # Otherwise all messages could be handled before the restart.
            started.set()
            await restarted.wait()
        await note(session, message)

    broker = with_options(copy_of(url), lease=timedelta(seconds=2))
    async with async_sessions_of(url) as sessions:
        consumer = Consumer(
            broker, sessions, name="billing", retry=NEVER, max_in_flight=4
        )
        consumer.handles("orders")(handle)
        async with running(consumer) as events:
            await started.wait()
            migrated_server.restart("immediate")
            restarted.set()
            await events.wait_for(HandlerDatabaseRecovered)
            await publish(url, Message("orders", b"last"))
            while len(effects(url)) < 101:
                count = len(events.of(MessageHandled))
                with suppress(TimeoutError):
                    await events.wait_for(MessageHandled, count + 1, timeout=1)
    assert events.of(HandlerFailed) == []
    assert effects(url) == sorted([*map(str, range(100)), "last"])


@pytest.mark.parametrize(
    ("change", "remedy", "words"),
    [
        (
            "REVOKE SELECT ON inbox.message FROM pillarbox_consumer",
            "GRANT SELECT ON inbox.message TO pillarbox_consumer",
            "permission denied",
        ),
        (
            "ALTER TABLE inbox.message RENAME TO gone",
            "ALTER TABLE inbox.gone RENAME TO message",
            "does not exist",
        ),
        # Nothing is claimed without lanes, so only leasing fails.
        (
            f"ALTER TABLE inbox.message RENAME TO gone; {END_LEASE}",
            "ALTER TABLE inbox.gone RENAME TO message",
            "does not exist",
        ),
    ],
    ids=["no privilege", "no table", "no table, and no lease"],
)
async def test_a_missing_privilege_or_table_is_reported_and_waited_for(
    database_url: str, change: str, remedy: str, words: str
) -> None:
    as_consumer = f"{database_url}?options=-crole%3Dpillarbox_consumer"
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(copy_of(as_consumer), sessions, name="billing", retry=NEVER)
        consumer.handles("orders")(handle)
        async with running(consumer) as events:
            await publish(database_url, Message("orders", b"1"))
            await events.wait_for(MessageHandled)
            execute(database_url, change)
            lost, *_ = await events.wait_for(SourceLost)
            assert words in lost.reason
            execute(database_url, remedy)
            await events.wait_for(SourceRecovered)
            await publish(database_url, Message("orders", b"2"))
            await events.wait_for(MessageHandled, 2)


async def publish(url: str, *messages: Message) -> None:
    async with PostgresPublisher(copy_of(url)) as publisher:
        assert await publisher.publish(messages) == [Acked()] * len(messages)


async def test_the_consumers_role_has_all_the_privileges_it_needs(
    database_url: str,
) -> None:
    as_consumer = f"{database_url}?options=-crole%3Dpillarbox_consumer"
    source = InboxSource(
        as_consumer,
        consumer="billing",
        topics=["orders"],
        sweep_interval=timedelta(milliseconds=100),
    )

    async def refuse_one(session: AsyncSession, message: Message) -> None:
        if message.payload == b"1":
            raise DeadLetter("as asked")

    async with consuming(
        as_consumer, source, refuse_one, driver="psycopg async"
    ) as events:
        await publish(database_url, *numbered(3, keys=3))
        await events.wait_for(MessageHandled, 2)
        await events.wait_for(MessageDeadLettered)
    query = "SELECT count(*) FROM inbox.delivery_status WHERE acked_at IS NULL"
    assert execute(database_url, query) == [(0,)]
