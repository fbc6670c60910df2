"""Drain a full pgqueuer queue as its own benchmark does.

Five consumers run in one process on uvloop, each with a connection and batches of ten.

Two things are in the peer's favour: all handlers are coroutines, while half of those in
its benchmark are plain functions, and the time its consumers take to stop is not
counted.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import psycopg
import uvloop  # type: ignore[import-not-found]  # in its own environment
from pgqueuer import PgQueuer  # type: ignore[import-not-found]
from pgqueuer.db import PsycopgDriver  # type: ignore[import-not-found]
from pgqueuer.queries import Queries  # type: ignore[import-not-found]

from benchmarks.peers.arguments import Task, parse, report
from benchmarks.workload import TOPIC, Workload

CONSUMERS = 5
BATCH = 10
LOOK_AGAIN = 0.005


async def main(task: Task) -> None:
    async with AsyncExitStack() as stack:
        watching, *draining = [
            await stack.enter_async_context(
                await psycopg.AsyncConnection.connect(
                    task.database_url, autocommit=True
                )
            )
            for _ in range(1 + CONSUMERS)
        ]
        await fill(watching, task.workload)
        seconds = await drain(watching, draining, task.workload.messages)
        left = await queued(watching)
    report(messages=task.workload.messages, seconds=seconds, left=left)


async def fill(connection: psycopg.AsyncConnection[Any], workload: Workload) -> None:
    queries = Queries(PsycopgDriver(connection))
    await queries.install()
    payloads = [payload for _key, payload in workload]
    await queries.enqueue([TOPIC] * len(payloads), payloads, [0] * len(payloads))
    await connection.execute("VACUUM ANALYZE pgqueuer")


async def drain(
    watching: psycopg.AsyncConnection[Any],
    draining: list[psycopg.AsyncConnection[Any]],
    messages: int,
) -> float:
    """Return the seconds from the start of all consumers to the last job's settling."""
    handled = 0
    all_handled = asyncio.Event()

    async def handle_nothing(job: Any) -> None:
        nonlocal handled
        handled += 1
        if handled == messages:
            all_handled.set()

    consumers = [PgQueuer(PsycopgDriver(connection)) for connection in draining]
    for consumer in consumers:
        consumer.entrypoint(TOPIC)(handle_nothing)
    started = time.perf_counter()
    running = asyncio.gather(
        *(consumer.run(batch_size=BATCH) for consumer in consumers)
    )
    await all_handled.wait()
    while await queued(watching):  # noqa: ASYNC110 (its database tells, no event)
        await asyncio.sleep(LOOK_AGAIN)
    seconds = time.perf_counter() - started
    for consumer in consumers:
        consumer.shutdown.set()
    await running
    return seconds


async def queued(connection: psycopg.AsyncConnection[Any]) -> int:
    """Count the jobs that aren't settled; settled jobs are in pgqueuer's log."""
    found = await connection.execute("SELECT count(*) FROM pgqueuer")
    row = await found.fetchone()
    assert row is not None
    return int(row[0])


if __name__ == "__main__":
    uvloop.run(main(parse("Drain a full pgqueuer queue.")))
