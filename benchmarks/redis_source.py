"""How fast a consumer drains Redis Streams, compared with XREADGROUP and XACK.

The loop guarantees nothing: no order, no receipts, no transaction.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from redis.asyncio import Redis

from benchmarks.brokers import BROKERS
from benchmarks.conditions import Conditions, show
from benchmarks.consuming import BATCHES, NAME, SINGLE, Way, consume
from benchmarks.drain import publisher_of
from benchmarks.measure import Answer, Variant, measure
from benchmarks.workload import TOPIC, Workload
from outbox.message import Message

BATCH = 500
LOOP = "bare loop"


def answers(conditions: Conditions) -> Iterator[Answer]:
    workload = Workload(messages=conditions.size(20_000, quick=5_000))
    batches, single = (
        Variant(label=way.label, run=our_rate(conditions, workload, way))
        for way in (BATCHES, SINGLE)
    )
    found = measure(
        batches,
        single,
        Variant(label=LOOP, run=loop_rate(workload)),
        runs=conditions.runs(),
        on_run=lambda label, figure: show(label, figure, "/s"),
    )
    loop = found.other(LOOP).median
    for label, rate in (
        (batches.label, found.median),
        (single.label, found.other(single.label).median),
    ):
        yield Answer(
            question=f"Redis source: {label}, against XREADGROUP and XACK alone",
            figure=rate / loop,
            noise=found.noise,
            detail=f"{workload.messages:,} messages: {found.medians('/s')}",
        )


def our_rate(
    conditions: Conditions, workload: Workload, way: Way
) -> Callable[[], float]:
    def run() -> float:
        with BROKERS["redis"].server() as broker, conditions.migrated_database() as url:
            asyncio.run(publish(broker, workload))
            return consume(url, broker, workload.messages, way)

    return run


def loop_rate(workload: Workload) -> Callable[[], float]:
    def run() -> float:
        with BROKERS["redis"].server() as broker:
            asyncio.run(publish(broker, workload))
            return workload.messages / asyncio.run(loop(broker, workload.messages))

    return run


async def publish(broker: str, workload: Workload) -> None:
    messages = iter([Message(TOPIC, payload, key=key) for key, payload in workload])
    async with publisher_of(broker) as publisher:
        while batch := list(islice(messages, BATCH)):
            await publisher.publish(batch)


async def loop(broker: str, messages: int) -> float:
    """Return the seconds from the first read to the last ack, with the same batches."""
    async with Redis.from_url(broker) as client:
        await client.xgroup_create(TOPIC, NAME, id="0")
        acked = 0
        started = time.perf_counter()
        while acked < messages:
            streams: Any = await client.xreadgroup(
                NAME, "loop", {TOPIC: ">"}, count=BATCH
            )
            ((_, entries),) = streams
            acked += await client.xack(TOPIC, NAME, *(at for at, _ in entries))
        return time.perf_counter() - started
