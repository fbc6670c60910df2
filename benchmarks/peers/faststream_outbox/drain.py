"""Drain a full faststream-outbox table with a subscriber that has default settings.

The handler does nothing, or its result is published to a broker, as in the quick start
of faststream-outbox.

Two things are in the peer's favour: the autovacuum settings that it recommends are
applied, and its two log lines for each message are switched off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from itertools import islice
from typing import Any

from faststream_outbox import (  # type: ignore[import-not-found]  # see txoutbox
    OutboxBroker,
    make_outbox_table,
    outbox_autovacuum_ddl,
)
from sqlalchemy import MetaData, Table, func, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from benchmarks.peers.arguments import Task, parse, report
from benchmarks.workload import TOPIC, Workload

FILL_BATCH = 1_000


async def main(task: Task) -> None:
    engine = create_async_engine(
        task.database_url.replace("postgresql://", "postgresql+asyncpg://", 1)
    )
    metadata = MetaData()
    table = make_outbox_table(metadata)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
            await connection.execute(text(outbox_autovacuum_ddl(table.name)))
        await fill(engine, table, task.workload)
        seconds = await drain(engine, table, task.workload.messages, task.broker_url)
        async with engine.connect() as connection:
            left = await connection.scalar(select(func.count()).select_from(table))
        assert left is not None
        report(messages=task.workload.messages, seconds=seconds, left=left)
    finally:
        await engine.dispose()


async def fill(engine: AsyncEngine, table: Table, workload: Workload) -> None:
    broker = OutboxBroker(engine, outbox_table=table)
    payloads: Iterator[bytes] = (payload for _key, payload in workload)
    async with engine.begin() as connection:
        while batch := list(islice(payloads, FILL_BATCH)):
            await broker.publish_batch(*batch, queue=TOPIC, session=connection)
    async with engine.connect() as connection:
        autocommit = await connection.execution_options(isolation_level="AUTOCOMMIT")
        await autocommit.execute(text(f"VACUUM ANALYZE {table.name}"))


async def drain(
    engine: AsyncEngine, table: Table, messages: int, broker_url: str | None
) -> float:
    """Return the seconds from the broker's start to the deletion of the last row."""
    acked = 0
    drained = asyncio.Event()

    def count_acked(event: str, tags: Mapping[str, Any]) -> None:
        nonlocal acked
        acked += event == "acked"
        if acked == messages:
            drained.set()

    broker = OutboxBroker(
        engine, outbox_table=table, metrics_recorder=count_acked, logger=None
    )

    async with subscribed(broker, broker_url):
        started = time.perf_counter()
        await broker.start()
        await drained.wait()
        seconds = time.perf_counter() - started
        await broker.stop()
    return seconds


@asynccontextmanager
async def subscribed(broker: Any, broker_url: str | None) -> AsyncIterator[None]:
    """Register a handler; its results are published if a broker is given."""
    subscriber = broker.subscriber(TOPIC)
    if broker_url is None:

        @subscriber  # type: ignore[untyped-decorator]
        async def handle_nothing(body: dict[str, Any]) -> None:
            """Accept every message at once."""

        yield
        return
    destination, publisher = destination_of(broker_url)

    @publisher  # type: ignore[untyped-decorator]
    @subscriber  # type: ignore[untyped-decorator]
    async def relay(body: dict[str, Any]) -> dict[str, Any]:
        """Return the body, which is then published."""
        return body

    await destination.connect()
    try:
        yield
    finally:
        await destination.stop()


def destination_of(url: str) -> tuple[Any, Any]:
    """Return the broker of a URL, and its publisher, which waits for each answer."""
    # Its types depend on the other packages in mypy's environment.
    if url.startswith("nats:"):
        nats = import_module("faststream.nats")
        to_nats = nats.NatsBroker(url, logger=None)
        stream = nats.JStream("orders", declare=False)
        return to_nats, to_nats.publisher(TOPIC, stream=stream)
    to_redis = import_module("faststream.redis").RedisBroker(url, logger=None)
    return to_redis, to_redis.publisher(stream=TOPIC)


if __name__ == "__main__":
    asyncio.run(main(parse("Drain a full faststream-outbox table.")))
