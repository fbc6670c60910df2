"""One replica at a time runs the schedule, whatever the server's settings."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import pytest

from inbox.sources.memory import MemorySource
from outbox.errors import DatabaseUnavailableError
from pillarbox import Consumer
from relay.dead_letters.retry import publishing_retrier
from tests.fixtures.consumers import async_sessions_of, sessions_of
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.sessions import execute

pytestmark = pytest.mark.timeout(180)

Open: TypeAlias = Callable[[], AbstractAsyncContextManager[Any]]

LIMITS = """
    SELECT name FROM pg_settings
     WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')
"""
HOLDERS = """
    SELECT pg_terminate_backend(pid) FROM pg_locks
     WHERE locktype = 'advisory' AND objid = 104 AND granted
       AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


@pytest.fixture(params=["relay", "psycopg", "asyncpg", "plain functions"])
async def open_retrier(
    database_url: str, request: pytest.FixtureRequest
) -> AsyncIterator[Open]:
    name = urlsplit(database_url).path.lstrip("/")
    for (limit,) in execute(database_url, LIMITS):
        execute(database_url, f"ALTER DATABASE {name} SET {limit} = '500ms'")
    async with AsyncExitStack() as stack:
        sessions: Any
        if request.param == "relay":
            yield lambda: publishing_retrier(database_url, ScriptedPublisher)
            return
        if request.param == "plain functions":
            sessions = stack.enter_context(sessions_of(database_url))
        else:
            opened = async_sessions_of(database_url, request.param)
            sessions = await stack.enter_async_context(opened)
        consumer = Consumer(MemorySource(), sessions, name="billing")
        yield consumer.retrier


async def test_no_server_timeout_ends_a_scheduled_retry(
    database_url: str, open_retrier: Open
) -> None:
    async with open_retrier() as first, first.alone() as alone:
        assert alone
        for _ in range(10):  # each transaction stays within the limit
            await asyncio.to_thread(execute, database_url, "SELECT pg_sleep(0.1)")
        async with open_retrier() as second, second.alone() as alone_too:
            assert not alone_too
    async with open_retrier() as second, second.alone() as alone_then:
        assert alone_then


async def test_a_lost_lock_is_reported_in_one_line(
    database_url: str, open_retrier: Open
) -> None:
    async def lose_the_lock() -> None:
        async with open_retrier() as retrier, retrier.alone() as alone:
            assert alone
            assert execute(database_url, HOLDERS) == [(True,)]

    with pytest.raises(DatabaseUnavailableError, match=r"lock .* was lost") as told:
        await lose_the_lock()
    assert "\n" not in str(told.value)
