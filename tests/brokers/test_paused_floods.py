"""A flood of a paused topic holds up no other topic, and is handled once resumed."""

import asyncio
from collections import defaultdict
from datetime import timedelta
from typing import Any

import pytest

from pillarbox import Message
from pillarbox.inbox.consuming import backlog, pauses
from pillarbox.inbox.consuming.backlog import Backlog
from pillarbox.inbox.events import DeliveriesReceived, MessageHandled
from pillarbox.inbox.source import Delivery, Source
from pillarbox.outbox.lane import PRIORITIES
from tests.fixtures.adapters import Adapters, adapters_of
from tests.fixtures.consumers import consuming
from tests.fixtures.pauses import change, seen

APART = ("redis", "nats", "kafka", "sqs", "sns")
"""Brokers that have topics apart, so that no more of a paused one is read."""
IN_ORDER = (*APART, "memory", "postgres", "rabbitmq", "rabbitmq in shards")
SHARED = ("redis", "nats")
FLOOD = 200
BEFORE = 40
"""Messages of the flood that are published before the pause."""
OTHERS = 20
KEYS = 5

pytestmark = pytest.mark.usefixtures("quick_beats")


@pytest.fixture
def adapters(request: pytest.FixtureRequest, broker: str) -> Adapters:
    return adapters_of(broker, request)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "READ_AHEAD", 20)
    monkeypatch.setattr(pauses, "_AWAY", timedelta(milliseconds=500))


def numbered(topic: str, numbers: range, key: str = "key") -> list[Message]:
    return [
        Message(
            topic,
            str(n).encode(),
            key=f"{key} {n % KEYS}",
            priority=PRIORITIES[n % KEYS % len(PRIORITIES)],
        )
        for n in numbers
    ]


@pytest.mark.parametrize(
    ("broker", "order"),
    [*[(it, "key") for it in IN_ORDER], *[(it, "none") for it in SHARED]],
)
async def test_other_topics_go_on_beside_a_flood_of_a_paused_one(
    adapters: Adapters, database_url: str, broker: str, order: Any
) -> None:
    paused, other = adapters.topics
    handled: dict[tuple[str, str | None], list[int]] = defaultdict(list)
    # The outbox keeps a key in order across topics, so it waits with the paused topic.
    key = "other" if broker == "postgres" else "key"
    may_end = asyncio.Event()

    async def handle(session: Any, message: Message) -> None:
        await may_end.wait()
        handled[message.topic, message.key].append(int(message.payload))

    source = adapters.source("billing")
    limits = {"max_in_flight": 10, "max_waiting": 10, "order": order}
    async with (
        consuming(database_url, source, handle, **limits) as events,
        adapters.publisher() as publisher,
    ):
        # It holds some, in handlers and before them, when the topic is paused.
        await publisher.publish(numbered(paused, range(BEFORE)))
        await events.wait_for(DeliveriesReceived)
        change(database_url, "pause", "billing", paused)
        await seen(events, paused)
        may_end.set()
        await publisher.publish(numbered(paused, range(BEFORE, FLOOD)))
        await publisher.publish(numbered(other, range(OTHERS), key))
        async with asyncio.timeout(20):
            while sum(e.topic == other for e in events.of(MessageHandled)) < OTHERS:
                await events.wait_for(
                    MessageHandled, len(events.of(MessageHandled)) + 1
                )
        begun = [e for e in events.of(MessageHandled) if e.topic == paused]
        assert len(begun) <= 10, "what was in flight has ended"
        if broker in APART:
            assert len(backlog_of(source)) < BEFORE + 20, "no more is read"
        change(database_url, "resume", "billing", paused)
        await events.wait_for(MessageHandled, FLOOD + OTHERS)
    for topic, name, count in ((paused, "key", FLOOD), (other, key, OTHERS)):
        for k in range(KEYS):
            numbers = handled[topic, f"{name} {k}"]
            if order == "none":
                numbers.sort()
            assert numbers == list(range(k, count, KEYS))


@pytest.mark.parametrize("broker", ["redis in shards", "nats", "kafka"])
async def test_a_paused_topic_is_shared_with_a_new_replica_and_resumes_in_order(
    adapters: Adapters, broker: str
) -> None:
    paused, other = adapters.topics
    topics: set[str] = set()
    arrived: list[Message] = []

    def has_its_share(replica: Any) -> bool:
        shares = replica._logs if broker == "kafka" else replica.abilities.standing_by()
        return len(shares) == 1 if broker == "kafka" else bool(shares)

    async def receive(source: Source) -> None:
        for delivery in await source.receive(limit=10):
            assert delivery.message.topic not in topics, "it is paused"
            arrived.append(delivery.message)
            await delivery.ack()

    replicas = [adapters.source("billing") for _ in range(2)]
    for source in replicas:
        assert source.abilities.pauses(lambda topic: topic in topics)
    async with adapters.publisher() as publisher, replicas[0]:
        await publisher.publish(numbered(paused, range(OTHERS)))
        held: list[Delivery] = []
        while len(held) < KEYS:
            held += await replicas[0].receive(limit=KEYS - len(held))
        topics.add(paused)
        for delivery in reversed(held):
            await delivery.nack()
        async with replicas[1]:
            for topic in (paused, other):
                await publisher.publish(numbered(topic, range(OTHERS, 2 * OTHERS)))
            while len(arrived) < OTHERS or not all(map(has_its_share, replicas)):
                for source in replicas:
                    await receive(source)
            topics.clear()
            while len({message.id for message in arrived}) < 3 * OTHERS:
                for source in replicas:
                    await receive(source)
    # A broker may redeliver what it got no ack of in time.
    by_key: dict[str | None, dict[int, None]] = defaultdict(dict)
    for message in arrived:
        if message.topic == paused:
            by_key[message.key].setdefault(int(message.payload))
    assert all([*numbers] == sorted(numbers) for numbers in by_key.values())


def backlog_of(source: Any) -> Backlog[Any]:
    keeper = getattr(source, "_keeper", None)
    found: Backlog[Any] = source._backlog if keeper is None else keeper.backlog
    return found
