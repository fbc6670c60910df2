"""The consumer survives outages, and needs only the privileges of its role."""

import asyncio
from contextlib import suppress
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from pillarbox import Consumer, Message
from pillarbox.inbox.events import (
    ConsumerStarted,
    HandlerDatabaseLost,
    HandlerDatabaseRecovered,
    HandlerFailed,
    MessageHandled,
    SourceLost,
    SourceRecovered,
)
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.observability.health import Health
from pillarbox.outbox.observability.presence import PresenceNotRecorded
from pillarbox.outbox.testing.lifetime import free_port
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.consumers import (
    DRIVERS,
    NEVER,
    POOLS,
    async_sessions_of,
    consuming,
    is_plain,
    numbered,
    running,
)
from tests.fixtures.effects import EFFECTS, effects, note
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.readers import add_consumer
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute
from tests.fixtures.urls import with_options
from tests.fixtures.variants import in_turn
from tests.fixtures.waiting import answer_after

MOST_PROBES = 15
"""In 2 s: 20 is the fastest backoff, and 3 or 4 are usual, with a pool's own tries."""
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


@pytest.mark.parametrize("driver", [*DRIVERS, *POOLS])
async def test_during_an_outage_messages_do_not_reconnect_one_by_one(
    database_url: str, proxy: MakeProxy, driver: str
) -> None:
    between, url = proxy(database_url)
    source = MemorySource()
    handler = do_nothing_plainly if is_plain(driver) else do_nothing
    async with consuming(url, source, handler, driver=driver, retry=NEVER) as events:
        between.redirect(free_port())
        source.add(*numbered(100, keys=100))
        await events.wait_for(HandlerDatabaseLost, timeout=60)
        # Each has failed once by itself, and a pool's own tries have become rare.
        await answer_after(2.0)
        before = between.connections
        await answer_after(2.0)
        assert between.connections - before <= MOST_PROBES
        port = urlsplit(database_url).port
        assert port is not None
        between.redirect(port)
        await events.wait_for(MessageHandled, 100, timeout=60)
    assert events.of(HandlerFailed) == []


@pytest.mark.parametrize(
    ("driver", "fault"),
    in_turn(["psycopg", "asyncpg", "async pool"], ["refuse", "stall"]),
)
async def test_an_idle_consumer_notices_that_its_database_is_unavailable(
    database_url: str,
    proxy: MakeProxy,
    monkeypatch: pytest.MonkeyPatch,
    driver: str,
    fault: str,
) -> None:
    monkeypatch.setattr("pillarbox.outbox.observability.presence.INTERVAL", 0.1)
    monkeypatch.setattr("pillarbox.inbox.handlers.attempt.ANSWER_LIMIT", 4.0)
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
    monkeypatch.setattr("pillarbox.outbox.observability.presence.INTERVAL", 0.1)
    async with consuming(database_url, MemorySource(), handle) as events:
        execute(database_url, "DROP TABLE inbox.process CASCADE")
        await events.wait_for(PresenceNotRecorded, 2)
        assert events.of(HandlerDatabaseLost) == []


async def test_a_restart_of_broker_and_database_loses_nothing(
    migrated_server: PostgresServer,
) -> None:
    url = migrated_server.url
    execute(url, EFFECTS)
    add_consumer(url, "billing", "orders")
    insert(url, *numbered(100, keys=10))
    started, restarted = asyncio.Event(), asyncio.Event()

    async def handle(session: AsyncSession, message: Message) -> None:
        if message.payload == b"50":
            # Otherwise all messages could be handled before the restart.
            started.set()
            await restarted.wait()
        await note(session, message)

    broker = with_options(url, lease=timedelta(seconds=2))
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
            insert(url, Message("orders", b"last"))
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
            "REVOKE SELECT ON outbox.message FROM pillarbox_relay",
            "GRANT SELECT ON outbox.message TO pillarbox_relay",
            "permission denied",
        ),
        (
            "ALTER TABLE outbox.message RENAME TO gone",
            "ALTER TABLE outbox.gone RENAME TO message",
            "does not exist",
        ),
        # Nothing is claimed without lanes, so only leasing fails.
        (
            f"ALTER TABLE outbox.message RENAME TO gone; {END_LEASE}",
            "ALTER TABLE outbox.gone RENAME TO message",
            "does not exist",
        ),
    ],
    ids=["no privilege", "no table", "no table, and no lease"],
)
async def test_a_missing_privilege_or_table_is_reported_and_waited_for(
    database_url: str, change: str, remedy: str, words: str
) -> None:
    as_reader = f"{database_url}?options=-crole%3Dpillarbox_relay"
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(as_reader, sessions, name="billing", retry=NEVER)
        consumer.handles("orders")(handle)
        async with running(consumer) as events:
            insert(database_url, Message("orders", b"1"))
            await events.wait_for(MessageHandled)
            execute(database_url, change)
            lost, *_ = await events.wait_for(SourceLost)
            assert words in lost.reason
            execute(database_url, remedy)
            await events.wait_for(SourceRecovered)
            insert(database_url, Message("orders", b"2"))
            await events.wait_for(MessageHandled, 2)
