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

from inbox.events import MessageHandled
from inbox.jobs.job import AsyncJob, Job
from inbox.sources.memory import MemorySource
from pillarbox import Consumer, Message
from tests.fixtures.consumers import QUICK, running, sessions_by

SMALL_POOL = {"pool_size": 3, "max_overflow": 0}
CLOSED = "This Session has been permanently closed"


def register(consumer: Consumer, kind: str, use: Callable[[Any], None]) -> None:
    """Register a handler that passes its session to `use`."""

    def one(session: Any, message: Any) -> None:
        use(session)

    def long(job: Job, message: Message) -> None:
        with job.transaction() as session:
            use(session)

    match kind:
        case "single":
            consumer.handles("*")(one)
        case "batch":
            consumer.handles_batch("*", max_size=2)(one)
        case _:
            consumer.job("*", lease=timedelta(seconds=60))(long)


def register_async(consumer: Consumer, kind: str, use: Callable[[Any], None]) -> None:
    async def one(session: Any, message: Any) -> None:
        use(session)

    async def long(job: AsyncJob, message: Message) -> None:
        async with job.transaction() as session:
            use(session)

    match kind:
        case "single":
            consumer.handles("*")(one)
        case "batch":
            consumer.handles_batch("*", max_size=2)(one)
        case _:
            consumer.job("*", lease=timedelta(seconds=60))(long)


KINDS = ("single", "batch", "job")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("driver", ["psycopg async", "asyncpg"])
async def test_tasks_that_outlive_their_handlers_take_no_connections(
    database_url: str, driver: str, kind: str
) -> None:
    is_over = asyncio.Event()
    late: list[asyncio.Task[Any]] = []

    async def use_late(session: Any) -> None:
        await is_over.wait()
        await session.execute(text("SELECT 1"))

    source = MemorySource(*(Message("t", b"") for _ in range(3)))
    async with sessions_by(database_url, driver, SMALL_POOL) as sessions:
        consumer = Consumer(source, sessions, name="c", retry=QUICK)
        register_async(
            consumer, kind, lambda session: late.append(start(use_late(session)))
        )
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


@pytest.mark.parametrize("kind", KINDS)
async def test_a_thread_that_outlives_its_handler_takes_no_connection(
    database_url: str, kind: str
) -> None:
    kept: list[Any] = []
    source = MemorySource(Message("t", b""))
    async with sessions_by(database_url, "psycopg", SMALL_POOL) as sessions:
        consumer = Consumer(source, sessions, name="c", retry=QUICK)
        register(consumer, kind, kept.append)
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


@pytest.mark.parametrize("driver", ["psycopg async", "asyncpg"])
async def test_a_connection_that_a_task_was_using_at_the_end_holds_up_nobody(
    database_url: str, driver: str
) -> None:
    late: list[asyncio.Task[Any]] = []
    begun = asyncio.Event()

    async def use(session: Any) -> None:
        begun.set()
        await session.execute(text("SELECT pg_sleep(0.1)"))

    source = MemorySource(Message("t", b""), Message("t", b""))
    pool = {"pool_size": 1, "max_overflow": 0}
    async with sessions_by(database_url, driver, pool) as sessions:
        consumer = Consumer(source, sessions, name="c", retry=QUICK, max_in_flight=1)

        @consumer.handles("*")
        async def handle(session: Any, message: Message) -> None:
            if not late:
                late.append(start(use(session)))
                await begun.wait()  # then it waits for the server

        async with running(consumer) as events:
            await events.wait_for(MessageHandled, 2)
        await asyncio.gather(*late, return_exceptions=True)
