"""Starts are counted for many messages at once, and each gets its own answer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from uuid import UUID

import psycopg
import pytest
from sqlalchemy.exc import DBAPIError

from pillarbox import uuid7
from pillarbox.inbox.dead_letters.write import StoredFailure
from pillarbox.inbox.handlers.sessions import make_executor
from pillarbox.inbox.poison.store import Count, SuspectStore
from pillarbox.outbox.postgres.connection import conninfo
from tests.fixtures.consumers import DRIVERS, async_sessions_of, id_of, sessions_by
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

BLOCKED = """
SELECT 1 FROM pg_stat_activity
 WHERE datname = current_database() AND wait_event_type = 'Lock'
"""
# Inserted here because the store keeps a failure only if it can in time.
FAILED_ONCE = """
INSERT INTO inbox.suspect (message_id, message_at, consumer, starts, is_open)
VALUES (%s, inbox.moment_of(%s), 'billing', 1, false)
"""
STARTS = "SELECT message_id, starts FROM inbox.suspect"


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[SuspectStore]:
    async with async_sessions_of(database_url) as sessions:
        yield SuspectStore(make_executor(sessions, "billing", 4), "billing")


def starts(url: str) -> dict[UUID, int]:
    return dict(execute(url, STARTS))


@pytest.mark.parametrize("driver", DRIVERS)
async def test_each_message_gets_its_own_answer(database_url: str, driver: str) -> None:
    new, open_, failed, old = *(uuid7() for _ in range(3)), id_from_last_year()
    async with sessions_by(database_url, driver) as sessions:
        executor = make_executor(sessions, "billing", 4)
        try:
            store = SuspectStore(executor, "billing")
            assert await store.count(open_, unless_open=True) == Count(1, True)
            await store.keep(failed, 2, StoredFailure("ValueError: no", None))
            answers = await asyncio.gather(
                *(
                    store.count(id, unless_open=True)
                    for id in (old, new, open_, failed)
                ),
                return_exceptions=True,
            )
            assert isinstance(answers[0], DBAPIError)
            assert answers[1:] == [Count(1, True), Count(1, False), Count(3, True)]
            await asyncio.gather(
                store.uncount(new), store.uncount(failed), store.delete(open_)
            )
        finally:
            await executor.close()
    assert starts(database_url) == {failed: 2}


def id_from_last_year() -> UUID:
    return id_of(datetime.now(UTC) - timedelta(days=400))


@asynccontextmanager
async def blocked(url: str) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """Lock the existing rows; yield a function that waits for a blocked session."""

    async def wait_until_blocked() -> None:
        found = partial(execute, url, BLOCKED)
        await asyncio.to_thread(wait_for, "a count is blocked", found)

    async with await psycopg.AsyncConnection.connect(conninfo(url)) as holding:
        await holding.execute("SELECT 1 FROM inbox.suspect FOR UPDATE")
        yield wait_until_blocked


async def test_a_start_cancelled_while_it_waits_is_not_counted(
    store: SuspectStore, database_url: str
) -> None:
    known, cancelled, other = (uuid7() for _ in range(3))
    execute(database_url, FAILED_ONCE, (known, known))
    async with blocked(database_url) as wait_until_a_count_is_blocked:
        at_work = asyncio.create_task(store.count(known, unless_open=True))
        await wait_until_a_count_is_blocked()
        waiting = [
            asyncio.create_task(store.count(id, unless_open=True))
            for id in (cancelled, other)
        ]
        await wait_until_a_count_is_blocked()
        waiting[0].cancel()
    assert await at_work == Count(2, True)
    assert await waiting[1] == Count(1, True)
    assert waiting[0].cancelled()
    assert starts(database_url) == {known: 2, other: 1}


async def test_a_request_that_timed_out_does_not_block_later_ones(
    store: SuspectStore, database_url: str
) -> None:
    known, other = uuid7(), uuid7()
    execute(database_url, FAILED_ONCE, (known, known))
    async with blocked(database_url):
        # It times out while it waits for the lock.
        await store.delete(known)
        execute(database_url, FAILED_ONCE, (other, other))
        await store.delete(other)
        assert starts(database_url) == {known: 1}
    await store.delete(known)
    assert starts(database_url) == {}


async def test_each_request_for_the_same_message_is_counted(
    store: SuspectStore, database_url: str
) -> None:
    id = uuid7()
    counts = await asyncio.gather(
        *(store.count(id, unless_open=False) for _ in range(3))
    )

    assert counts == [Count(1, True), Count(2, True), Count(3, True)]
