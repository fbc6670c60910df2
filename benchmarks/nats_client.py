"""What our client for NATS costs, compared with nats-py's public way.

A figure is messages per second of this process's time, in which the server has no part.
Python calls are counted in a run of their own (`call` of `sys.setprofile`).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import FrameType
from typing import Any, TypeAlias

import nats
from nats.aio.msg import Msg

from benchmarks.brokers import BROKERS
from benchmarks.conditions import Conditions, show
from benchmarks.measure import Answer, Variant, at_least, measure
from benchmarks.workload import TOPIC, Workload
from pillarbox.inbox.sources.nats import NatsSource
from pillarbox.outbox.brokers.nats.message import MESSAGE_ID, PREFIX, decode_message
from pillarbox.outbox.cloudevents.headers import to_headers
from pillarbox.outbox.message import Message
from pillarbox.relay.publisher import Acked
from pillarbox.relay.publishers.nats import NatsPublisher
from pillarbox.relay.publishers.nats.publisher import read_answer

BATCH = 500
OURS = "pillarbox"
Way: TypeAlias = Callable[[str, Sequence[Message]], Coroutine[Any, Any, None]]


def answers(conditions: Conditions) -> Iterator[Answer]:
    size = conditions.size(20_000, quick=5_000)
    messages = [Message(TOPIC, body, key=key) for key, body in Workload(messages=size)]
    for what, ways in WAYS.items():
        ours, *others = (
            Variant(label=label, run=lambda w=way: size / run(w, messages))  # type: ignore[misc]
            for label, way in ways.items()
        )
        found = measure(
            ours,
            *others,
            runs=conditions.runs(),
            on_run=lambda label, figure: show(label, figure, "/s"),
        )
        calls = {label: counted(way, messages) / size for label, way in ways.items()}
        for other in others:
            yield Answer(
                question=f"NATS: {what}, against nats-py's {other.label}",
                figure=found.ratio(other.label),
                target=at_least(1.2),
                noise=found.noise,
                detail=f"{size:,} messages: {found.medians('/s')}; Python calls for "
                f"each {calls[OURS]:.0f} and {calls[other.label]:.0f}",
            )


def counted(way: Way, messages: Sequence[Message]) -> int:
    """Return the number of Python calls."""
    number = 0

    def called(frame: FrameType, event: str, arg: object) -> None:
        nonlocal number
        number += event == "call"

    run(way, messages, lambda: sys.setprofile(called))
    return number


def run(
    way: Way, messages: Sequence[Message], begin: Callable[[], None] = lambda: None
) -> float:
    """Return the seconds of this process; what is consumed is published before."""
    with BROKERS["nats"].server() as url:
        if way in WAYS["consuming"].values():
            asyncio.run(publish(url, messages))
        begin()
        try:
            started = time.process_time()
            asyncio.run(way(url, messages))
            return time.process_time() - started
        finally:
            sys.setprofile(None)


def batches(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    return (messages[at : at + BATCH] for at in range(0, len(messages), BATCH))


def headers_of(message: Message) -> dict[str, str]:
    return to_headers(message, PREFIX) | {MESSAGE_ID: str(message.id)}


async def publish(url: str, messages: Sequence[Message]) -> None:
    async with NatsPublisher(url) as publisher:
        for batch in batches(messages):
            assert all(it == Acked() for it in await publisher.publish(batch))


async def publish_with_replies(url: str, messages: Sequence[Message]) -> None:
    """As our publisher does it, with the public `publish` and `subscribe`."""
    missing: dict[str, Message] = {}
    answered = asyncio.Event()

    async def on_reply(reply: Msg) -> None:
        answer, _ = read_answer(reply, missing.pop(reply.subject))
        assert answer == Acked()
        if not missing:
            answered.set()

    async with await nats.connect(url, pending_size=0) as client:
        inbox = client.new_inbox()
        await client.subscribe(f"{inbox}.*", cb=on_reply)
        for batch in batches(messages):
            answered.clear()
            for number, message in enumerate(batch):
                missing[reply := f"{inbox}.{number}"] = message
                await client.publish(TOPIC, message.payload, reply, headers_of(message))
            await answered.wait()


async def publish_async(url: str, messages: Sequence[Message]) -> None:
    async with await nats.connect(url) as client:
        jetstream = client.jetstream()
        for batch in batches(messages):
            answers = [
                await jetstream.publish_async(
                    TOPIC, message.payload, headers=headers_of(message)
                )
                for message in batch
            ]
            await jetstream.publish_async_completed()
            assert all(answer.result().seq for answer in answers)


async def consume(url: str, messages: Sequence[Message]) -> None:
    left = len(messages)
    async with NatsSource(url, consumer="billing", topics=[TOPIC]) as source:
        while left:
            deliveries = await source.receive(limit=BATCH)
            for delivery in deliveries:
                await delivery.ack()
            left -= len(deliveries)


async def fetch(url: str, messages: Sequence[Message]) -> None:
    left = len(messages)
    async with await nats.connect(url) as client:
        source = await client.jetstream().pull_subscribe(TOPIC, durable="billing")
        while left:
            fetched = await source.fetch(BATCH)
            for got in fetched:
                decode_message(got.headers or {}, got.data)
                await got.ack()
            left -= len(fetched)
        await client.flush()


WAYS: dict[str, dict[str, Way]] = {
    "publishing": {
        OURS: publish,
        "publish with a reply": publish_with_replies,
        "publish_async": publish_async,
    },
    "consuming": {OURS: consume, "fetch and ack": fetch},
}
