"""How much faster batch handlers are than one-message handlers, in one consumer.

The source is a list in this process, so only the handling is measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import psycopg
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from benchmarks.conditions import Conditions, show
from benchmarks.consuming import BATCHES, CONNECTIONS, NAME, SINGLE, Way, stop_after
from benchmarks.measure import Answer, Variant, at_least, measure
from benchmarks.workload import TOPIC, Workload
from pillarbox.inbox.consumer import Consumer
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.events import Observer
from pillarbox.outbox.message import Message
from pillarbox.outbox.postgres.connection import sqlalchemy_url

TABLE = "CREATE TABLE effect (id bigserial PRIMARY KEY, payload bytea NOT NULL)"
EFFECT = text("INSERT INTO effect (payload) VALUES (:payload)")


def answers(conditions: Conditions) -> Iterator[Answer]:
    workload = Workload(messages=conditions.size(20_000, quick=5_000))
    batches, single = (
        Variant(label=way.label, run=rate(conditions, workload, way))
        for way in (BATCHES, SINGLE)
    )
    found = measure(
        batches,
        single,
        runs=conditions.runs(),
        on_run=lambda label, figure: show(label, figure, "/s"),
    )
    yield Answer(
        question=f"batch handlers of {BATCHES.batch}: against one message at a time",
        figure=found.ratio(single.label),
        target=at_least(5.0),
        noise=found.noise,
        detail=f"{workload.messages:,} messages, a row each: {found.medians('/s')}",
    )


def rate(conditions: Conditions, workload: Workload, way: Way) -> Callable[[], float]:
    """Measure the messages handled per second, each with its own row and a receipt."""

    def run() -> float:
        with conditions.migrated_database() as url:
            with psycopg.connect(url) as connection:
                connection.execute(TABLE)
            messages = [Message(TOPIC, body, key=key) for key, body in workload]
            return workload.messages / asyncio.run(handled(url, messages, way))

    return run


async def handled(
    url: str,
    messages: Sequence[Message],
    way: Way,
    observers: Iterable[Observer] = (),
) -> float:
    """Return the seconds from the consumer's start to its end, after the last ack."""
    engine = create_async_engine(sqlalchemy_url(url), pool_size=CONNECTIONS)
    consumer = Consumer(
        MemorySource(*messages),
        async_sessionmaker(engine),
        name=NAME,
        max_in_flight=way.max_in_flight,
        observers=observers,
    )
    stop_after(consumer, len(messages))
    if way.batch is None:
        consumer.handles(TOPIC)(handle)
    else:
        consumer.handles_batch(TOPIC, max_size=way.batch)(handle_batch)
    started = time.perf_counter()
    await consumer.run()
    seconds = time.perf_counter() - started
    await engine.dispose()
    return seconds


async def handle(session: AsyncSession, message: Message) -> None:
    await session.execute(EFFECT, row_of(message))


async def handle_batch(session: AsyncSession, messages: Sequence[Message]) -> None:
    await session.execute(EFFECT, [row_of(message) for message in messages])


def row_of(message: Message) -> Mapping[str, bytes]:
    return {"payload": message.payload}
