"""How long a message waits behind another tenant's flood, and what the index costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import psycopg
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from benchmarks.conditions import Conditions, show
from benchmarks.measure import Answer, Variant, at_most, measure, quantity
from inbox.consumer import Consumer
from outbox.administration.connection import administration
from outbox.administration.readers import add_reader
from outbox.administration.tenants import add_tenant_index
from outbox.lane import Priority, lanes_of
from outbox.message import Message
from outbox.postgres.connection import sqlalchemy_url
from pillarbox import insert_statement
from relay.publishers.postgres import PostgresPublisher

CONNECTIONS = 16
NAME = "billing"
DIRECT_URL = "postgres:///?direct=true"
FEW = 1_000
BEFORE = 100
BATCH = 500
SUBSCRIBE = "INSERT INTO inbox.subscription VALUES ('billing', 'orders')"
FLOOD = """
INSERT INTO {log}.message
       ({id}, lane, schema_version, topic, key, tenant, content_type, headers, payload)
SELECT outbox.uuid7(), {lane} + n %% 16, 1, 'orders',
       concat_ws(' ', %s::text, n %% 1600), %s, 'text/plain', '{{}}',
       convert_to(repeat('x', 300), 'UTF8')
  FROM generate_series(1, %s) AS n
"""
WITHOUT_INDEX = "DROP INDEX inbox.message_tenant_idx"


def answers(conditions: Conditions) -> Iterator[Answer]:
    yield wait(conditions)
    yield wait(conditions, direct=True)
    yield from inserts(conditions)


def wait(conditions: Conditions, *, direct: bool = False) -> Answer:
    """Compare the wait behind a deep flood with that behind a shallow one."""
    many = conditions.size(100_000, quick=10_000)
    waits = partial(waiting, conditions, direct=direct)
    found = measure(
        Variant(label=f"{many:,}", run=waits(many, "flood", "other")),
        Variant(label=f"{FEW:,}", run=waits(FEW, "flood", "other")),
        runs=conditions.runs(3),
        on_run=lambda label, figure: show(label, figure, "ms"),
    )
    without = waits(many, None, None)()
    said = ", read from the outbox" if direct else ""
    return Answer(
        question=f"fair share{said}: a wait behind {many:,} messages against behind "
        f"{FEW:,}",
        figure=found.ratio(f"{FEW:,}"),
        target=at_most(3 * found.noise),
        noise=found.noise,
        detail=f"{found.medians('ms')}; {many:,} without tenants "
        f"{quantity(without, 'ms')}, measured once",
    )


def waiting(
    conditions: Conditions,
    count: int,
    flooder: str | None,
    other: str | None,
    *,
    direct: bool,
) -> Callable[[], float]:
    """Measure milliseconds from a message's commit to its handler, during a flood."""
    log, id = ("outbox", "id") if direct else ("inbox", "message_id")
    lane = lanes_of(Priority.DEFAULT)[0] if direct else 0
    flood = FLOOD.format(log=log, id=id, lane=lane).encode()

    def run() -> float:
        with conditions.migrated_database() as url:
            with administration(url, application_name="benchmark") as connection:
                if direct:
                    add_reader(connection, NAME, ["orders"], broker=DIRECT_URL)
                    add_tenant_index(connection)
                else:
                    connection.execute(SUBSCRIBE)
                connection.execute(flood, (flooder, flooder, count))
                connection.execute(f"VACUUM ANALYZE {log}.message".encode())
            return 1000 * asyncio.run(seconds_waited(url, other, direct=direct))

    return run


async def seconds_waited(url: str, tenant: str | None, *, direct: bool) -> float:
    engine = create_async_engine(sqlalchemy_url(url), pool_size=CONNECTIONS)
    source = f"{url}{'&' if '?' in url else '?'}direct=true" if direct else url
    consumer = Consumer(
        source, async_sessionmaker(engine), name=NAME, max_in_flight=CONNECTIONS
    )
    awaited = Message("orders", b"", key="another", tenant=tenant)
    handled = 0
    begun, arrived = asyncio.Event(), asyncio.Event()

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        nonlocal handled
        handled += 1
        if handled == BEFORE:
            begun.set()
        if message.id == awaited.id:
            arrived.set()

    running = asyncio.create_task(consumer.run())
    try:
        await begun.wait()
        if direct:
            async with engine.connect() as connection:
                await connection.execute(insert_statement(awaited))
                started = time.perf_counter()
                await connection.commit()
            await arrived.wait()
            return time.perf_counter() - started
        async with PostgresPublisher(url) as publisher:
            started = time.perf_counter()
            await publisher.publish([awaited])
            await arrived.wait()
            return time.perf_counter() - started
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await engine.dispose()


def inserts(conditions: Conditions) -> Iterator[Answer]:
    """Compare the publisher's rates with and without the index."""
    for tenant in (None, "acme"):
        found = measure(
            Variant(label="with", run=rate(conditions, tenant)),
            Variant(label="without", run=rate(conditions, tenant, WITHOUT_INDEX)),
            runs=conditions.runs(5),
            on_run=lambda label, figure: show(label, figure, "/s"),
        )
        named = "no tenant" if tenant is None else "a tenant"
        yield Answer(
            question=f"fair share: inserts of {named}, with the index against without",
            figure=found.ratio("without"),
            noise=found.noise,
            detail=f"inserted {found.medians('/s')}",
        )


def rate(
    conditions: Conditions, tenant: str | None, *statements: str
) -> Callable[[], float]:
    """Measure the deliveries inserted per second."""
    batches = conditions.size(200, quick=60)

    def run() -> float:
        with conditions.migrated_database() as url:
            with psycopg.connect(url, autocommit=True) as connection:
                for statement in (SUBSCRIBE, *statements):
                    connection.execute(statement)
            return asyncio.run(published_a_second(url, tenant, batches))

    return run


async def published_a_second(url: str, tenant: str | None, batches: int) -> float:
    made = [
        [
            Message("orders", b"x" * 300, key=f"{n % 1000}", tenant=tenant)
            for n in range(BATCH)
        ]
        for _ in range(batches)
    ]
    async with PostgresPublisher(url) as publisher:
        started = time.perf_counter()
        for batch in made:
            await publisher.publish(batch)
        return batches * BATCH / (time.perf_counter() - started)
