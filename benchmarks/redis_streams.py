"""How much of what relay and Redis allow together the relay to Redis Streams reaches.

If settling a message and publishing it shared nothing and overlapped in nothing, the
two costs would add up: 1 / (1 / relay to nothing + 1 / publishing alone).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import islice

from benchmarks.conditions import Conditions, show
from benchmarks.drain import NOWHERE, drain, publisher_of
from benchmarks.fill import fill
from benchmarks.measure import Answer, Variant, at_least, measure
from benchmarks.workload import TOPIC, Workload
from outbox.message import Message
from outbox.testing.redis import redis_server
from relay.config import RelayConfig
from relay.publisher import Acked


def answers(conditions: Conditions) -> Iterator[Answer]:
    workload = Workload(messages=conditions.size(50_000, quick=20_000))
    found = measure(
        Variant(label="to Redis", run=lambda: with_redis(conditions, workload)),
        Variant(label="to nothing", run=lambda: relayed(conditions, workload, NOWHERE)),
        Variant(label="publishing alone", run=lambda: published(workload)),
        runs=conditions.runs(),
        on_run=lambda label, figure: show(label, figure, "/s"),
    )
    together = 1 / sum(1 / other.median for other in found.others)
    yield Answer(
        question="Redis Streams: against what the two costs allow together",
        figure=found.median / together,
        target=at_least(0.8),
        noise=found.noise,
        detail=f"{workload.messages:,} messages: {found.medians('/s')}",
    )


def with_redis(conditions: Conditions, workload: Workload) -> float:
    with redis_server() as redis:
        return relayed(conditions, workload, redis.url)


def relayed(conditions: Conditions, workload: Workload, broker_url: str) -> float:
    with conditions.migrated_database() as url:
        fill(url, workload)
        return drain(url, workload.messages, broker_url).rate


def published(workload: Workload) -> float:
    """Publish as the relay does, so many batches in flight, without a database."""
    messages = iter([Message(TOPIC, body, key=key) for key, body in workload])
    with redis_server() as redis:
        return workload.messages / asyncio.run(publish(redis.url, messages))


async def publish(broker_url: str, messages: Iterator[Message]) -> float:
    config = RelayConfig()
    async with publisher_of(broker_url) as publisher:

        async def publish_batches() -> None:
            while batch := list(islice(messages, config.batch_size)):
                for answer in await publisher.publish(batch):
                    assert isinstance(answer, Acked), answer

        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(config.concurrency):
                group.create_task(publish_batches())
        return time.perf_counter() - started
