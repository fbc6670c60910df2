"""How close the relay's rate to a broker is to the limit set by relay and broker.

If settling and publishing a message shared no work and never overlapped, the two costs
would add up: 1 / (1 / relay to nothing + 1 / publishing alone).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import islice

from benchmarks.brokers import Broker
from benchmarks.conditions import Conditions, show
from benchmarks.drain import NOWHERE, drain, publisher_of
from benchmarks.fill import fill
from benchmarks.measure import Answer, Variant, at_least, measure
from benchmarks.workload import TOPIC, Workload
from pillarbox.outbox.message import Message
from pillarbox.relay.config import RelayConfig
from pillarbox.relay.publisher import Acked


def answers(broker: Broker, conditions: Conditions) -> Iterator[Answer]:
    workload = Workload(
        messages=conditions.size(broker.messages, quick=broker.few_messages)
    )
    found = measure(
        Variant(
            label="to the broker",
            run=lambda: relayed_to(broker, conditions, workload),
        ),
        Variant(label="to nothing", run=lambda: relayed(conditions, workload, NOWHERE)),
        Variant(label="publishing alone", run=lambda: published(broker, workload)),
        runs=conditions.runs(),
        on_run=lambda label, figure: show(label, figure, "/s"),
    )
    together = 1 / sum(1 / other.median for other in found.others)
    yield Answer(
        question=f"{broker.label}: against what the two costs allow together",
        figure=found.median / together,
        target=at_least(0.8),
        noise=found.noise,
        detail=f"{workload.messages:,} messages: {found.medians('/s')}",
    )


def relayed_to(broker: Broker, conditions: Conditions, workload: Workload) -> float:
    """Return the messages per second, from the relay's start to the last settling."""
    with broker.server() as broker_url:
        return relayed(conditions, workload, broker_url)


def relayed(conditions: Conditions, workload: Workload, broker_url: str) -> float:
    with conditions.migrated_database() as url:
        fill(url, workload)
        return drain(url, workload.messages, broker_url).rate


def published(broker: Broker, workload: Workload) -> float:
    """Publish with as many batches in flight as the relay, but without a database."""
    messages = iter([Message(TOPIC, body, key=key) for key, body in workload])
    with broker.server() as broker_url:
        return workload.messages / asyncio.run(publish(broker_url, messages))


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
