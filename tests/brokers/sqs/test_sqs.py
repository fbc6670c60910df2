"""Behaviour specific to SQS and SNS, on moto's server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from pillarbox import Message
from pillarbox.inbox.poison.history import FIRST_DELIVERY, REDELIVERED
from pillarbox.inbox.source import Delivery
from pillarbox.inbox.sources.sqs import SqsSource
from pillarbox.inbox.sources.sqs.queue import SqsQueue
from pillarbox.outbox.brokers.sqs.connection import SqsSettings
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox.outbox.lane import Priority
from pillarbox.outbox.testing.lifetime import free_port
from pillarbox.outbox.testing.samples import differences, full_message, numbered
from pillarbox.relay.publisher import Acked, Nacked
from pillarbox.relay.publishers.sqs import SqsPublisher
from tests.fixtures.sources import payloads, publish, receive
from tests.fixtures.sqs import Aws, fresh
from tests.fixtures.urls import with_options
from tests.fixtures.waiting import answer_after
from tests.servers.sqs import SqsServer

SOON = timedelta(milliseconds=100)


@asynccontextmanager
async def source(url: str, *topics: str, **options: object) -> AsyncIterator[SqsSource]:
    options = {"wait": timedelta(seconds=1), **options}
    settings = SqsSettings.from_url(with_options(url, **options))
    made = SqsSource(settings, consumer="billing", topics=topics, poll_interval=SOON)
    async with made as entered:
        yield entered


async def test_the_error_names_the_size_limit_of_the_queue_until_it_is_raised(
    shared_sqs: SqsServer, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pillarbox.relay.publishers.sqs.publisher._FRESH", 0.0)
    topic = fresh()
    queue = await aws.create_queue(topic, MaximumMessageSize="2048")
    async with SqsPublisher.from_url(shared_sqs.url()) as publisher:
        large, small = Message(topic, b"x" * 2000), Message(topic, b"x" * 1000)
        answers = await publisher.publish([large, small])
        raised = {"MaximumMessageSize": "4096"}
        await aws.call("sqs", "set_queue_attributes", QueueUrl=queue, Attributes=raised)
        assert await publisher.publish([large]) == [Acked()]
    assert isinstance(answers[0], Nacked)
    assert answers[0].permanent
    assert f"limit of queue {topic} is 2048" in answers[0].reason
    assert answers[1] == Acked()


async def test_a_missing_queue_is_named_and_holds_back_only_its_key(
    shared_sqs: SqsServer, aws: Aws
) -> None:
    topic, missing = fresh(), fresh()
    await aws.create_queue(topic)
    batch = [
        Message(missing, b"1", key="a"),
        Message(topic, b"2", key="a"),
        Message(topic, b"3", key="b"),
    ]
    async with SqsPublisher.from_url(shared_sqs.url()) as publisher:
        answers = await publisher.publish(batch)
        assert answers == [
            Nacked(f"queue {missing} doesn't exist: create it"),
            Nacked("waiting behind a refused message of its key"),
            Acked(),
        ]
        await aws.create_queue(missing)
        assert await publisher.publish(batch) == [Acked()] * 3


@pytest.mark.parametrize("raw", [True, False])
async def test_a_message_arrives_through_sns_with_or_without_an_envelope(
    shared_sqs: SqsServer, aws: Aws, raw: bool
) -> None:
    topic = fresh()
    await aws.subscribe(topic, f"billing-{topic}", raw=raw)
    url = shared_sqs.url("sns")
    messages = [full_message(topic), Message(topic, b"\xff\0"), Message(topic, b"")]
    await publish(url, *messages)
    async with source(url, topic) as consumer:
        arrived = {d.message.id: d for d in await receive(consumer, 3)}
    for message in messages:
        assert arrived[message.id].problem is None
        assert differences(message, arrived[message.id].message) == {}


async def test_one_queue_can_receive_all_topics_of_a_consumer(
    shared_sqs: SqsServer, aws: Aws
) -> None:
    one, other, queue = fresh(), fresh(), fresh("queue")
    for topic in (one, other):
        await aws.subscribe(topic, f"billing-{queue}")
        await publish(shared_sqs.url("sns"), Message(topic, b"1"))
    url = f"{shared_sqs.url('sns')}&queue=%7Bconsumer%7D-{queue}"
    async with source(url, one, "*") as consumer:
        assert {d.message.topic for d in await receive(consumer, 2)} == {one, other}


async def test_the_queue_of_a_paused_topic_is_not_polled_until_it_is_resumed(
    shared_sqs: SqsServer, aws: Aws
) -> None:
    paused, other = fresh(), fresh()
    queue = await aws.create_queue(paused)
    await aws.create_queue(other)
    topics, no_wait = {paused}, {"wait": timedelta(0)}
    await publish(shared_sqs.url(), Message(paused, b"1"), Message(other, b"2"))
    async with source(shared_sqs.url(), paused, other, **no_wait) as consumer:
        assert consumer.abilities.pauses(lambda topic: topic in topics)
        assert payloads(await receive(consumer, 1)) == [2]
        assert not await consumer.receive(limit=1)
        taken = {"QueueUrl": queue, "VisibilityTimeout": 0}
        assert "Messages" in await aws.call("sqs", "receive_message", **taken)
        topics.clear()
        assert payloads(await receive(consumer, 1)) == [1]
    async with source(shared_sqs.url(), paused, other, queue=other) as consumer:
        assert not consumer.abilities.pauses(bool), "they share a queue"


async def test_urgent_messages_are_found_behind_as_many_as_were_just_handled(
    shared_sqs: SqsServer, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pillarbox.inbox.sources.sqs.source._SOON", 600.0)
    topic = fresh()
    await aws.create_queue(f"{topic}.fifo")
    bulk = [m.replace(priority=Priority.BULK) for m in numbered(topic, 60, keys=60)]
    urgent = Message(topic, b"urgent", key="urgent", priority=Priority.REALTIME)
    url = f"{shared_sqs.url()}&fifo=true"
    # Batches that are sent together may arrive in any order.
    await publish(url, *bulk)
    await publish(url, urgent)
    async with source(url, topic) as consumer:
        for delivery in await receive(consumer, 20, limit=10):
            await delivery.ack()
        received: list[Delivery] = []
        while (delivery := (await receive(consumer, 1, limit=1))[0]).message != urgent:
            received.append(delivery)
            if reading := consumer._polls._tasks:
                await asyncio.wait(reading)
        assert len(received) < 20


async def test_a_failed_message_of_a_group_comes_again_before_later_ones(
    shared_sqs: SqsServer, aws: Aws
) -> None:
    topic = fresh()
    await aws.create_queue(f"{topic}.fifo")
    url = f"{shared_sqs.url()}&fifo=true"
    await publish(url, *numbered(topic, 5))
    # It waits for longer than the visibility timeout.
    async with source(url, topic, visibility=timedelta(seconds=1)) as consumer:
        first, *others = await receive(consumer, 5)
        await first.nack(timedelta(seconds=2))
        for delivery in reversed(others):
            await delivery.nack()
        again = await receive(consumer, 5)
        assert payloads(again) == [0, 1, 2, 3, 4]
        assert [d.attempts for d in again] == [1, 0, 0, 0, 0]


async def test_a_delay_outlives_its_replica(shared_sqs: SqsServer, aws: Aws) -> None:
    topic = fresh()
    await aws.create_queue(f"{topic}.fifo")
    url = f"{shared_sqs.url()}&fifo=true"
    await publish(url, *numbered(topic, 2))
    async with source(url, topic) as consumer:
        first, _ = await receive(consumer, 2)
        await first.nack(timedelta(minutes=5))
    async with source(url, topic) as other:
        for _ in range(5):
            assert not await other.receive(limit=10)


async def test_a_message_that_was_held_too_long_is_left_to_its_redelivery(
    shared_sqs: SqsServer, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = 0.001
    monkeypatch.setattr("pillarbox.inbox.sources.sqs.source._BEATS", never)
    await aws.create_queue(topic := fresh())
    await publish(shared_sqs.url(), Message(topic, b"1"))
    async with source(shared_sqs.url(), topic, visibility=timedelta(seconds=1)) as slow:
        (delivery,) = await receive(slow, 1)
        await delivery.nack()
        await answer_after(1.2)
        (delivery,) = await receive(slow, 1)
        assert delivery.history is REDELIVERED


async def test_a_message_that_is_lost_no_longer_holds_back_its_group(
    shared_sqs: SqsServer, aws: Aws
) -> None:
    topic = fresh()
    queue = await aws.create_queue(f"{topic}.fifo")
    url = f"{shared_sqs.url()}&fifo=true"
    await publish(url, Message(topic, b"1", key="k"))
    async with source(url, topic, visibility=timedelta(seconds=1)) as slow:
        (delivery,) = await receive(slow, 1)
        await delivery.nack(timedelta(hours=1))
        await aws.call("sqs", "purge_queue", QueueUrl=queue)
        await publish(url, Message(topic, b"2", key="k"))
        assert payloads(await receive(slow, 1)) == [2]


async def test_a_throttled_heartbeat_loses_nothing_and_a_throttled_ack_is_repeated(
    shared_sqs: SqsServer, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = SqsQueue.call
    answered: dict[str, int] = {}
    repeated = {
        name: asyncio.Event()
        for name in ("change_message_visibility_batch", "delete_message_batch")
    }
    await aws.create_queue(topic := fresh())
    await publish(shared_sqs.url(), Message(topic, b"1"))

    async def throttle_first(queue: SqsQueue, name: str, entries: Any) -> Any:
        answered[name] = answered.get(name, 0) + 1
        if answered[name] == 1:
            throttled = {"Code": "ThrottlingException"}
            return {"Failed": [{"Id": each["Id"], **throttled} for each in entries]}
        answer = await call(queue, name, entries)
        repeated[name].set()
        return answer

    monkeypatch.setattr(SqsQueue, "call", throttle_first)
    async with (
        source(shared_sqs.url(), topic, visibility=timedelta(seconds=8)) as consumer,
        asyncio.timeout(60),
    ):
        (delivery,) = await receive(consumer, 1)
        await repeated["change_message_visibility_batch"].wait()
        await delivery.nack()
        (delivery,) = await receive(consumer, 1)
        assert delivery.history is FIRST_DELIVERY
        await delivery.ack()
        await repeated["delete_message_batch"].wait()


async def test_a_missing_queue_is_named_at_start(shared_sqs: SqsServer) -> None:
    with pytest.raises(ConfigError, match="has no queue nowhere: create it"):
        async with source(shared_sqs.url(), "nowhere"):
            pass


@pytest.mark.parametrize("scheme", ["sqs", "sns"])
async def test_the_error_for_an_unavailable_server_hides_the_secret(
    scheme: str,
) -> None:
    url = f"{scheme}://key:hush@eu-west-1/?endpoint_url=http://127.0.0.1:{free_port()}"
    with pytest.raises(BrokerUnavailableError) as told:
        async with SqsPublisher.from_url(url):
            pass
    with pytest.raises(BrokerUnavailableError):
        async with source(url, "orders"):
            pass
    assert "can't be reached" in str(told.value)
    assert "hush" not in str(told.value)
