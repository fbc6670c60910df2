"""How much faster three replicas of a consumer are with shards than without.

The handler waits ten milliseconds, as for another service, and inserts a row; each
replica calls it four times at once. Without shards, one replica reads and two stand by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import psycopg
from sqlalchemy.ext.asyncio import AsyncSession

from benchmarks import subscribers
from benchmarks.brokers import BROKERS
from benchmarks.conditions import Conditions, show
from benchmarks.consuming import NAME
from benchmarks.measure import Answer, Variant, alternate, quantity
from benchmarks.whole_way import (
    PROGRAMS,
    RELAY,
    TABLE,
    OnTheirWay,
    main,
    process,
    sessions,
)
from benchmarks.workload import TOPIC
from pillarbox.inbox.consumer import Consumer
from pillarbox.outbox.message import Message

SHARDS = (1, 3, 8)
REPLICAS = 3
AT_ONCE = 4
WAIT = 0.01
REPLICA = "replica"
MODULE = "benchmarks.shards"


def answers(conditions: Conditions) -> Iterator[Answer]:
    messages = conditions.size(5_000, quick=2_000)
    for name in ("redis", "nats", "rabbitmq"):
        variants = [
            Variant(
                label=f"{shards} shards",
                run=lambda name=name, shards=shards: rate(  # type: ignore[misc]
                    conditions, name, shards, messages
                ),
            )
            for shards in SHARDS
        ]
        series = alternate(
            variants,
            runs=conditions.runs(4),
            on_run=lambda label, figure: show(label, figure, "/s"),
        )
        rates = {label: each.median for label, each in series.items()}
        (alone, one), *others = rates.items()
        for label, found in others:
            yield Answer(
                question=f"{name}: {REPLICAS} replicas, {label} against {alone}",
                figure=found / one,
                noise=max(series[alone].figures) / min(series[alone].figures),
                detail=", ".join(f"{n} {quantity(r, '/s')}" for n, r in rates.items()),
            )


def rate(conditions: Conditions, name: str, shards: int, messages: int) -> float:
    """Return the messages handled per second by all replicas."""
    with ExitStack() as stack:
        broker_url = stack.enter_context(BROKERS[name].server())
        url = stack.enter_context(conditions.migrated_database())
        connection = stack.enter_context(psycopg.connect(url, autocommit=True))
        connection.execute("SET synchronous_commit = off")
        connection.execute(TABLE)
        sharded = f"{broker_url}?shards={shards}"
        for program in (RELAY, *[REPLICA] * REPLICAS):
            stack.enter_context(
                process(program, url, sharded, counted=False, module=MODULE)
            )
        way = OnTheirWay(connection, {})
        way.warm_up()
        return way.rate(messages)


async def replicate(url: str, broker_url: str) -> None:
    consumer = Consumer(broker_url, sessions(url), name=NAME, max_in_flight=AT_ONCE)

    @consumer.handles(TOPIC)
    async def handle(session: AsyncSession, message: Message) -> None:
        await asyncio.sleep(WAIT)
        await session.execute(subscribers.EFFECT, {"payload": message.payload})

    await consumer.run()


if __name__ == "__main__":
    main({**PROGRAMS, REPLICA: replicate})
