"""Drain a full procrastinate queue as its own benchmark does.

One worker runs with the default concurrency, which is one job at a time, and returns
when nothing is left.
"""

from __future__ import annotations

import asyncio
import time
from itertools import islice

from procrastinate import (  # type: ignore[import-not-found]  # in its own environment
    App,
    PsycopgConnector,
)

from benchmarks.peers.arguments import Task, parse, report
from benchmarks.workload import TOPIC

FILL_BATCH = 1_000
UNDONE = "SELECT count(*) AS jobs FROM procrastinate_jobs WHERE status <> 'succeeded'"


async def main(task: Task) -> None:
    app = App(connector=PsycopgConnector(conninfo=task.database_url))

    @app.task(queue=TOPIC, name="handle_nothing")  # type: ignore[untyped-decorator]
    async def handle_nothing(payload: str) -> None:
        """Accept every message at once."""

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        payloads = (payload.decode() for _key, payload in task.workload)
        while batch := [{"payload": p} for p in islice(payloads, FILL_BATCH)]:
            await handle_nothing.batch_defer_async(*batch)
        await app.connector.execute_query_async("ANALYZE procrastinate_jobs")
        started = time.perf_counter()
        await app.run_worker_async(queues=[TOPIC], wait=False)
        seconds = time.perf_counter() - started
        left = await app.connector.execute_query_one_async(UNDONE)
    report(messages=task.workload.messages, seconds=seconds, left=left["jobs"])


if __name__ == "__main__":
    asyncio.run(main(parse("Drain a full procrastinate queue.")))
