"""Drain a full txoutbox table with its relay: strict order, batches of 500.

The lease is longer than the default because txoutbox asks for that with batches of this
size; every other setting keeps its default.
"""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

from txoutbox import (  # type: ignore[import-not-found]  # in its own environment
    Hooks,
    OutboxMessage,
    Relay,
    RelayConfig,
)
from txoutbox.adapters.postgres import (  # type: ignore[import-not-found]
    PostgresStorage,
)

from benchmarks.peers.arguments import Task, parse, report
from benchmarks.workload import TOPIC

CONFIG = RelayConfig(batch_size=500, lease=timedelta(minutes=5))


async def publish_nothing(message: OutboxMessage) -> None:
    """Accept every message at once, as the publisher."""


async def main(task: Task) -> None:
    storage = await PostgresStorage.connect(task.database_url)
    try:
        await storage.create_schema()
        await fill(storage, task)
        seconds = await drain(storage, task.workload.messages)
        stats = await storage.stats()
        report(
            messages=task.workload.messages,
            seconds=seconds,
            left=stats.pending + stats.dead,
        )
    finally:
        await storage.close()


async def fill(storage: PostgresStorage, task: Task) -> None:
    rows = [(TOPIC, key, payload, "{}") for key, payload in task.workload]
    async with storage.pool.acquire() as connection:
        await connection.copy_records_to_table(
            "outbox", columns=["topic", "key", "payload", "headers"], records=rows
        )
        await connection.execute("VACUUM ANALYZE outbox")


async def drain(storage: PostgresStorage, messages: int) -> float:
    """Return the seconds from the relay's start to the ack of the last message."""
    published = 0
    hooks = Hooks()
    relay = Relay(storage, publish_nothing, config=CONFIG, hooks=hooks)

    async def stop_after_the_last(result: Any, _duration: float) -> None:
        nonlocal published
        published += result.published
        if published >= messages:
            relay.stop()

    hooks.on_round = stop_after_the_last
    started = time.perf_counter()
    await relay.run()
    return time.perf_counter() - started


if __name__ == "__main__":
    asyncio.run(main(parse("Drain a full txoutbox table.")))
