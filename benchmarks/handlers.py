"""How fast one consumer handles messages one by one, on sessions and on a pool.

Beside it, the loops that an application could write without the inbox: a receipt and a
row for each message in a transaction of its own, with as many at once. The source is a
list in this process, so only the handling is measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from benchmarks.batch_handlers import EFFECT, TABLE, handle, row_of
from benchmarks.conditions import Conditions, show
from benchmarks.consuming import CONNECTIONS, NAME, stop_after
from benchmarks.measure import Answer, Variant, at_least, measure
from benchmarks.workload import TOPIC, Workload
from pillarbox.inbox.consumer import Consumer
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.message import Message
from pillarbox.outbox.message_id import moment_of
from pillarbox.outbox.postgres.connection import sqlalchemy_url

INSERT = b"INSERT INTO effect (payload) VALUES (%s)"
RECEIPT = text(
    "INSERT INTO inbox.receipt (message_id, message_at, consumer)"
    " VALUES (:id, :at, :consumer) ON CONFLICT DO NOTHING"
)
RECEIPT_ON_DRIVER = (
    b"INSERT INTO inbox.receipt (message_id, message_at, consumer)"
    b" VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"
)
POOL, SESSIONS = "handlers on a pool", "handlers on AsyncSession"
BARE_POOL, BARE_SESSIONS = "a pool alone", "AsyncSession alone"

Loop = Callable[[str, Sequence[Message]], Coroutine[Any, Any, None]]


def answers(conditions: Conditions) -> Iterator[Answer]:
    workload = Workload(messages=conditions.size(10_000, quick=3_000))
    pool, *others = (
        Variant(label=label, run=rate(conditions, workload, loop))
        for label, loop in LOOPS.items()
    )
    found = measure(
        pool,
        *others,
        runs=conditions.runs(),
        on_run=lambda label, figure: show(label, figure, "/s"),
    )
    sessions = found.other(SESSIONS).median
    detail = f"{workload.messages:,} messages, a row each: {found.medians('/s')}"
    yield Answer(
        question=f"{POOL}: against {SESSIONS}",
        figure=found.ratio(SESSIONS),
        target=at_least(2.2),
        noise=found.noise,
        detail=detail,
    )
    yield Answer(
        question=f"{SESSIONS}: against {BARE_SESSIONS}",
        figure=sessions / found.other(BARE_SESSIONS).median,
        target=at_least(0.9),
        noise=found.noise,
        detail=detail,
    )


def rate(conditions: Conditions, workload: Workload, loop: Loop) -> Callable[[], float]:
    """Measure the messages handled per second."""

    def run() -> float:
        with conditions.migrated_database() as url:
            with psycopg.connect(url) as connection:
                connection.execute(TABLE)
            messages = [Message(TOPIC, body, key=key) for key, body in workload]
            started = time.perf_counter()
            asyncio.run(loop(url, messages))
            seconds = time.perf_counter() - started
            with psycopg.connect(url) as connection:
                ((rows,),) = connection.execute("SELECT count(*) FROM effect")
            assert rows == len(messages)
            return workload.messages / seconds

    return run


async def on_pool(url: str, messages: Sequence[Message]) -> None:
    async with AsyncConnectionPool(
        url, min_size=CONNECTIONS, max_size=CONNECTIONS, open=False
    ) as pool:
        await consume(pool, messages, handle_on_connection)


async def on_sessions(url: str, messages: Sequence[Message]) -> None:
    engine = create_async_engine(sqlalchemy_url(url), pool_size=CONNECTIONS)
    await consume(async_sessionmaker(engine), messages, handle)
    await engine.dispose()


async def consume(sessions: Any, messages: Sequence[Message], handler: Any) -> None:
    consumer = Consumer(
        MemorySource(*messages), sessions, name=NAME, max_in_flight=CONNECTIONS
    )
    stop_after(consumer, len(messages))
    consumer.handles(TOPIC)(handler)
    await consumer.run()


async def handle_on_connection(
    connection: psycopg.AsyncConnection, message: Message
) -> None:
    await connection.execute(INSERT, [message.payload])


async def pool_alone(url: str, messages: Sequence[Message]) -> None:
    async with AsyncConnectionPool(
        url, min_size=CONNECTIONS, max_size=CONNECTIONS, open=False
    ) as pool:

        async def insert(message: Message) -> None:
            async with pool.connection() as connection:
                receipt = [message.id, moment_of(message.id), NAME]
                await connection.execute(RECEIPT_ON_DRIVER, receipt)
                await connection.execute(INSERT, [message.payload])

        await for_each(messages, insert)


async def sessions_alone(url: str, messages: Sequence[Message]) -> None:
    engine = create_async_engine(sqlalchemy_url(url), pool_size=CONNECTIONS)
    sessions = async_sessionmaker(engine)

    async def insert(message: Message) -> None:
        async with sessions.begin() as session:
            at = moment_of(message.id)
            receipt = {"id": message.id, "at": at, "consumer": NAME}
            await session.execute(RECEIPT, receipt)
            await session.execute(EFFECT, row_of(message))

    await for_each(messages, insert)
    await engine.dispose()


async def for_each(
    messages: Sequence[Message], insert: Callable[[Message], Awaitable[None]]
) -> None:
    left = iter(messages)

    async def work() -> None:
        for message in left:
            await insert(message)

    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))


LOOPS: dict[str, Loop] = {
    POOL: on_pool,
    SESSIONS: on_sessions,
    BARE_POOL: pool_alone,
    BARE_SESSIONS: sessions_alone,
}
