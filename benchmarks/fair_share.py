"""How long a message waits behind another tenant's flood."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from benchmarks.conditions import Conditions, show
from benchmarks.measure import Answer, Variant, at_most, measure, quantity
from pillarbox import insert_statement
from pillarbox.inbox.consumer import Consumer
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import add_reader
from pillarbox.outbox.administration.tenants import add_tenant_index
from pillarbox.outbox.lane import Priority, lanes_of
from pillarbox.outbox.message import Message
from pillarbox.outbox.postgres.connection import sqlalchemy_url

CONNECTIONS = 16
NAME = "billing"
FEW = 1_000
BEFORE = 100
FLOOD = """
INSERT INTO outbox.message
       (id, lane, schema_version, topic, key, tenant, content_type, headers, payload)
SELECT outbox.uuid7(), {lane} + n %% 16, 1, 'orders',
       concat_ws(' ', %s::text, n %% 1600), %s, 'text/plain', '{{}}',
       convert_to(repeat('x', 300), 'UTF8')
  FROM generate_series(1, %s) AS n
"""


def answers(conditions: Conditions) -> Iterator[Answer]:
    """Compare the wait behind a deep flood with that behind a shallow one."""
    many = conditions.size(100_000, quick=10_000)
    waits = partial(waiting, conditions)
    found = measure(
        Variant(label=f"{many:,}", run=waits(many, "flood", "other")),
        Variant(label=f"{FEW:,}", run=waits(FEW, "flood", "other")),
        runs=conditions.runs(3),
        on_run=lambda label, figure: show(label, figure, "ms"),
    )
    without = waits(many, None, None)()
    yield Answer(
        question=f"fair share: a wait behind {many:,} messages against behind {FEW:,}",
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
) -> Callable[[], float]:
    """Measure milliseconds from a message's commit to its handler, during a flood."""
    flood = FLOOD.format(lane=lanes_of(Priority.DEFAULT)[0]).encode()

    def run() -> float:
        with conditions.migrated_database() as url:
            with administration(url, application_name="benchmark") as connection:
                add_reader(connection, NAME, ["orders"], for_consumer=True)
                add_tenant_index(connection)
                connection.execute(flood, (flooder, flooder, count))
                connection.execute("VACUUM ANALYZE outbox.message")
            return 1000 * asyncio.run(seconds_waited(url, other))

    return run


async def seconds_waited(url: str, tenant: str | None) -> float:
    engine = create_async_engine(sqlalchemy_url(url), pool_size=CONNECTIONS)
    consumer = Consumer(
        url, async_sessionmaker(engine), name=NAME, max_in_flight=CONNECTIONS
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
        async with engine.connect() as connection:
            await connection.execute(insert_statement(awaited))
            started = time.perf_counter()
            await connection.commit()
        await arrived.wait()
        return time.perf_counter() - started
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await engine.dispose()
