"""The RabbitMQ publisher with a full queue, or one that is down."""

import asyncio
from collections.abc import Sequence
from uuid import uuid4

import pytest

from pillarbox import Message
from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.relay.publisher import Acked, Nacked
from pillarbox.relay.publishers.rabbitmq import RabbitMQPublisher
from tests.fixtures.rabbitmq import bind, drain
from tests.fixtures.waiting import answer_after
from tests.servers.rabbitmq import RabbitMQServer

REJECTS = {"x-overflow": "reject-publish"}
TAKES_NOTHING = (
    "is not accepting messages: a queue for topic '.*' is full or not available"
)


@pytest.fixture
def topic() -> str:
    """A topic, and therefore a queue, that no other test uses."""
    return f"orders-{uuid4().hex}"


async def is_published(publisher: RabbitMQPublisher, batch: Sequence[Message]) -> bool:
    try:
        return await publisher.publish(batch) == [Acked()] * len(batch)
    except BrokerUnavailableError:
        # Pause as the relay does; a blocked connection is reported at once.
        await answer_after(0.05)
        return False


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_a_full_queue_is_unavailable_and_gets_each_message_once(
    rabbitmq_url: str, topic: str, kind: str
) -> None:
    bind(rabbitmq_url, topic, {"x-queue-type": kind, "x-max-length": 20} | REJECTS)
    messages = [Message(topic, b"") for _ in range(2_000)]
    batches = [messages[n : n + 50] for n in range(0, len(messages), 50)]
    async with RabbitMQPublisher(rabbitmq_url) as publisher:
        taken = 0
        while await is_published(publisher, batches[taken]):
            taken += 1
        with pytest.raises(BrokerUnavailableError, match=TAKES_NOTHING):
            await publisher.publish(batches[taken])
        arrived: list[Message] = []
        async with asyncio.timeout(50):
            while not await is_published(publisher, batches[taken]):
                arrived += drain(rabbitmq_url, topic, 0)
    expected = messages[: (taken + 1) * 50]
    arrived += drain(rabbitmq_url, topic, len(expected) - len(arrived))
    assert sorted(m.id for m in arrived) == sorted(m.id for m in expected)


async def test_a_full_queue_among_others_is_charged_to_its_own_messages(
    rabbitmq_url: str, topic: str
) -> None:
    bind(rabbitmq_url, "orders")
    bind(rabbitmq_url, topic, {"x-max-length": 0} | REJECTS)
    other, refused = Message("orders", b""), Message(topic, b"")
    async with RabbitMQPublisher(rabbitmq_url) as publisher:
        with pytest.raises(BrokerUnavailableError, match=TAKES_NOTHING):
            await publisher.publish([refused])
        first, second = await publisher.publish([other, refused])
        assert first == Acked()
        assert isinstance(second, Nacked)
        assert not second.permanent
        (again,) = await publisher.publish([refused])
        assert again == second


@pytest.mark.fault
async def test_a_queue_that_is_down_is_unavailable_until_it_is_up(
    shared_rabbitmq: RabbitMQServer, rabbitmq_url: str, topic: str
) -> None:
    bind(rabbitmq_url, topic, {"x-queue-type": "quorum"})
    server = f"quorum_queues, {{'%2F_{topic}', node()}}"
    batch = [Message(topic, b"") for _ in range(10)]
    shared_rabbitmq.evaluate(f"ok = ra:stop_server({server}).")
    async with RabbitMQPublisher(rabbitmq_url) as publisher:
        with pytest.raises(BrokerUnavailableError, match=TAKES_NOTHING):
            await publisher.publish(batch)
        shared_rabbitmq.evaluate(f"ok = ra:restart_server({server}).")
        async with asyncio.timeout(50):
            while not await is_published(publisher, batch):
                continue
    arrived = drain(rabbitmq_url, topic, len(batch))
    assert [m.id for m in arrived] == [m.id for m in batch]
