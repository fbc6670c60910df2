"""What outlives its handler can't go on with the handler's session.

A task or thread that did would begin a transaction that nobody ends, and keep its
connection.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import InvalidRequestError

from pillarbox import Consumer, Message
from pillarbox.inbox.events import MessageHandled
from pillarbox.inbox.jobs.job import AsyncJob, Job
from pillarbox.inbox.sources.memory import MemorySource
from tests.fixtures.consumers import QUICK, handles, running, sessions_by
from tests.fixtures.variants import in_turn

SMALL_POOL = {"pool_size": 3, "max_overflow": 0}
CLOSED = "This Session has been permanently closed"


def handler_of(use: Callable[[Any], None]) -> Callable[..., Any]:
    """Return a plain function that passes its session to `use`."""

    def handle(given: Any, message: Any) -> None:
        if isinstance(given, Job):
            with given.transaction() as session:
                use(session)
        else:
            use(given)

    return handle


def async_handler_of(use: Callable[[Any], None]) -> Callable[..., Any]:
    async def handle(given: Any, message: Any) -> None:
        if isinstance(given, AsyncJob):
            async with given.transaction() as session:
                use(session)
        else:
            use(given)

    return handle


KINDS: Any = [{}, {"batch": 2}, {"lease": timedelta(seconds=60)}]


@pytest.mark.parametrize(
    ("kind", "driver"), in_turn(KINDS, ["psycopg async", "asyncpg"])
)
async def test_tasks_that_outlive_their_handlers_take_no_connections(
    database_url: str, driver: str, kind: Any
) -> None:
    is_over = asyncio.Event()
    late: list[asyncio.Task[Any]] = []

    async def use_late(session: Any) -> None:
        await is_over.wait()
        await session.execute(text("SELECT 1"))

    source = MemorySource(*(Message("t", b"") for _ in range(3)))
    async with sessions_by(database_url, driver, SMALL_POOL) as sessions:
        consumer = Consumer(source, sessions, name="c", retry=QUICK)
        handler = async_handler_of(
            lambda session: late.append(start(use_late(session)))
        )
        handles(consumer, "*", **kind)(handler)
        async with running(consumer) as events:
            await events.wait_for(MessageHandled, 3)
            is_over.set()
            ends = await asyncio.gather(*late, return_exceptions=True)
            source.add(Message("t", b""))
            await events.wait_for(MessageHandled, 4)
        assert sessions.kw["bind"].pool.checkedout() == 0
        await asyncio.gather(*late, return_exceptions=True)

    assert ends
    assert all(isinstance(end, InvalidRequestError) for end in ends)
    assert all(CLOSED in str(end) for end in ends)


def start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(work)


@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_a_thread_that_outlives_its_handler_takes_no_connection(
    database_url: str, kind: Any
) -> None:
    kept: list[Any] = []
    source = MemorySource(Message("t", b""))
    async with sessions_by(database_url, "psycopg", SMALL_POOL) as sessions:
        consumer = Consumer(source, sessions, name="c", retry=QUICK)
        handles(consumer, "*", **kind)(handler_of(kept.append))
        async with running(consumer) as events:
            await events.wait_for(MessageHandled)
            ends: list[Exception] = []

            def use_late() -> None:
                try:
                    kept[0].execute(text("SELECT 1"))
                except InvalidRequestError as error:
                    ends.append(error)

            thread = threading.Thread(target=use_late)
            thread.start()
            await asyncio.to_thread(thread.join)
        assert sessions.kw["bind"].pool.checkedout() == 0

    (end,) = ends
    assert CLOSED in str(end)


async def test_a_connection_that_a_task_was_using_at_the_end_holds_up_nobody(
    database_url: str,
) -> None:
    late: list[asyncio.Task[Any]] = []
    begun = asyncio.Event()

    async def use(session: Any) -> None:
        begun.set()
        await session.execute(text("SELECT pg_sleep(0.1)"))

    source = MemorySource(Message("t", b""), Message("t", b""))
    pool = {"pool_size": 1, "max_overflow": 0}
    async with sessions_by(database_url, "asyncpg", pool) as sessions:
        consumer = Consumer(source, sessions, name="c", retry=QUICK, max_in_flight=1)

        @consumer.handles("*")
        async def handle(session: Any, message: Message) -> None:
            if not late:
                late.append(start(use(session)))
                await begun.wait()  # then it waits for the server

        async with running(consumer) as events:
            await events.wait_for(MessageHandled, 2)
        await asyncio.gather(*late, return_exceptions=True)
