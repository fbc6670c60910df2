"""Behaviour specific to the Kafka source: offsets, rebalances and buffering."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from typing_extensions import override

from pillarbox import Message
from pillarbox.inbox.poison.history import FIRST_DELIVERY, TakenOver
from pillarbox.inbox.source import Delivery
from pillarbox.inbox.sources.kafka import KafkaSource
from pillarbox.inbox.sources.kafka.reader import Part, Reader
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox.outbox.testing.samples import numbered
from tests.fixtures.foreign_messages import DEEP
from tests.fixtures.kafka import Kafka, client_config
from tests.fixtures.real_kafka import RealKafka
from tests.fixtures.sources import payloads, publish, receive, receive_despite_losses
from tests.fixtures.waiting import answer_after
from tests.servers.kafka import COMMIT, KafkaCluster

SOON = timedelta(milliseconds=50)
# After a member leaves, the mock makes a new member wait for the session timeout.
SESSION = "session.timeout.ms=1500&heartbeat.interval.ms=100"


@pytest.fixture
def topic(shared_kafka: Kafka) -> str:
    """A topic with one Kafka partition."""
    name = f"orders.{uuid4().hex}"
    shared_kafka.create_topic(name, partitions=1)
    return name


@asynccontextmanager
async def source(
    kafka: Kafka, topic: str, options: str = "", **changes: Any
) -> AsyncIterator[KafkaSource]:
    quick: dict[str, Any] = {"consumer": topic, "poll_interval": SOON}
    async with KafkaSource(
        f"{kafka.url}/?{SESSION}&{options}", topics=[topic], **(quick | changes)
    ) as entered:
        yield entered


def committed(kafka: Kafka, topic: str, partition: int = 0) -> int:
    consumer = Consumer(client_config(kafka.url) | {"group.id": topic})
    try:
        (found,) = consumer.committed([TopicPartition(topic, partition)], timeout=60)
    finally:
        consumer.close()
    return int(found.offset)


async def test_only_the_settled_prefix_is_committed(
    shared_kafka: Kafka, topic: str
) -> None:
    await publish(shared_kafka.url, *numbered(topic, 10))
    async with source(shared_kafka, topic) as consumer:
        deliveries = await receive(consumer, 10)
        for n in (9, 1, 0, 2, 5):
            await deliveries[n].ack()
    assert committed(shared_kafka, topic) == 3


async def test_a_forbidden_offset_commit_is_reported_and_retried(
    private_mock: KafkaCluster,
) -> None:
    private_mock.create_topic("orders", partitions=1)
    await publish(private_mock.url, *numbered("orders", 2))
    async with source(private_mock, "orders") as consumer:
        first, second = await receive(consumer, 2)
        private_mock.refuse(COMMIT, KafkaError.GROUP_AUTHORIZATION_FAILED)
        await first.ack()
        with pytest.raises(BrokerUnavailableError, match="can't commit offsets"):
            await receive(consumer, 1)
        await second.ack()
    assert committed(private_mock, "orders") == 2


class Deaf(Reader):
    """A reader that never learns from librdkafka that all brokers are down."""

    @override
    def _on_error(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN:
            super()._on_error(error)


async def test_an_outage_is_reported_even_if_librdkafka_does_not_report_it(
    private_mock: KafkaCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pillarbox.inbox.sources.kafka.source.Reader", Deaf)
    private_mock.create_topic("orders", partitions=1)
    await publish(private_mock.url, *numbered("orders", 1))
    async with source(private_mock, "orders") as consumer:
        (delivery,) = await receive(consumer, 1)
        await delivery.ack()
        private_mock.stop()
        with pytest.raises(BrokerUnavailableError, match="can't be reached"):
            await receive(consumer, 1)
        private_mock.start()
        await publish(private_mock.url, *numbered("orders", 1))
        assert payloads(await receive_despite_losses(consumer, 1, limit=1)) == [0]


class Asking(KafkaSource):
    """A source that asks for the topics while it leaves, as after a lost connection."""

    reader: Reader
    question: asyncio.Task[object]

    @override
    def leave(self, parts: Sequence[Part], left: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self.question = loop.create_task(self.reader.topics(loop.time() + 10.0))
        loop.call_soon(super().leave, parts, left)


async def test_a_question_while_partitions_leave_does_not_end_the_process(
    shared_kafka: Kafka, topic: str
) -> None:
    # If the client is asked within a callback, it aborts the process at the next
    # callback of the same call: when it closes, that of its last commit.
    await publish(shared_kafka.url, *numbered(topic, 1))
    async with Asking(
        f"{shared_kafka.url}/?{SESSION}", topics=[topic], consumer=topic
    ) as consumer:
        assert consumer._reader is not None
        consumer.reader = consumer._reader
        (delivery,) = await receive(consumer, 1)
        await delivery.ack()
    consumer.question.cancel()
    assert committed(shared_kafka, topic) == 1


async def test_attempts_are_counted_while_the_process_runs(
    shared_kafka: Kafka, topic: str
) -> None:
    await publish(shared_kafka.url, *numbered(topic, 1))
    async with source(shared_kafka, topic) as consumer:
        for attempts in range(3):
            (delivery,) = await receive(consumer, 1)
            assert delivery.attempts == attempts
            await delivery.nack(timedelta(milliseconds=5))
    async with source(shared_kafka, topic) as consumer:
        (delivery,) = await receive(consumer, 1)
        assert delivery.attempts == 0


async def test_messages_from_before_the_takeover_could_have_been_started(
    shared_kafka: Kafka, topic: str
) -> None:
    await publish(shared_kafka.url, *numbered(topic, 3))
    async with source(shared_kafka, topic) as consumer:
        before = await receive(consumer, 3)
        await publish(shared_kafka.url, *numbered(topic, 3))
        later = await receive(consumer, 3)
    assert [isinstance(d.history, TakenOver) for d in before] == [True] * 3
    assert [d.history for d in later] == [FIRST_DELIVERY] * 3


async def test_topics_are_found_by_prefix(shared_kafka: Kafka) -> None:
    name = uuid4().hex
    topics = [f"{name}.a", f"{name}xa", f"{name}.b"]
    await publish(shared_kafka.url, *(Message(each, b"1") for each in topics))
    async with source(shared_kafka, f"{name}.*") as consumer:
        deliveries = await receive(consumer, 2)
        assert await consumer.receive(limit=1) == []
    assert {d.message.topic for d in deliveries} == {topics[0], topics[2]}


@pytest.mark.variant
async def test_the_newer_group_protocol_finds_topics_by_prefix_too(
    real_node: RealKafka,
) -> None:
    name = uuid4().hex
    real_node.create_topic(f"{name}.a", partitions=1)
    await publish(real_node.url, Message(f"{name}.a", b"1"))
    async with KafkaSource(
        f"{real_node.url}/?group.protocol=consumer", consumer=name, topics=[f"{name}.*"]
    ) as consumer:
        (delivery,) = await receive(consumer, 1)
    assert delivery.message.topic == f"{name}.a"


async def test_a_missing_topic_is_reported_at_start(
    private_kafka: Kafka,
) -> None:
    never = "allow.auto.create.topics=false"
    with pytest.raises(ConfigError, match=r"topic 'nowhere'.*create it"):
        async with source(private_kafka, "nowhere", never):
            pass


async def test_foreign_records_are_read_as_far_as_possible(
    shared_kafka: Kafka, topic: str
) -> None:
    sent = Message(topic, b"", headers={"traceparent": "00", "Größe": 'ü"'})
    attributes: dict[str, str | bytes | None] = {
        "ce_id": str(sent.id).encode(),
        "ce_type": topic.encode(),
        "content-type": sent.content_type.encode(),
    }
    absent = {"ce_tenant": None, "ce_partitionkey": None, "x": None}
    own = [json.dumps(dict(sent.headers)), "{}", '{"n": 1}', "[]", "{", DEEP]
    producer = Producer(client_config(shared_kafka.url))
    producer.produce(topic, None, b"\xff")
    producer.produce(topic, b"1", headers=[("ce_id", b"\xff")])
    producer.produce(topic, b"2", headers=[("ce_type", b"x"), ("ce_id", b"7")])
    producer.produce(topic, b"", headers={**attributes, **absent})
    for text in own:
        producer.produce(topic, b"", headers={"pillarbox-headers": text, **attributes})
    assert producer.flush(60) == 0
    async with source(shared_kafka, topic) as consumer:
        deliveries = await receive(consumer, 10)

    *foreign, without, whole, bare, one, two, three, four = deliveries
    problems = [delivery.problem or "" for delivery in foreign]
    assert "tombstone" in problems[0]
    assert "header ce_id b'\\xff': isn't UTF-8" in problems[1]
    assert "isn't a UUID" in problems[2]
    assert [d.message.payload for d in foreign] == [b"", b"1", b"2"]
    assert without.message == sent.replace(headers={"x": ""})
    assert without.message.tenant is None
    assert whole.message == sent
    assert bare.message == sent.replace(headers={})
    for delivery in (one, two, three, four):
        assert delivery.problem is not None
        assert delivery.problem.endswith(
            ": isn't a JSON object of strings; fix the producer"
        )


async def test_a_rebalance_waits_for_handlers_in_progress(shared_kafka: Kafka) -> None:
    topic = f"orders.{uuid4().hex}"
    await publish(shared_kafka.url, *numbered(topic, 40, keys=20))
    # The mock limits a rebalance to the session timeout.
    options = "session.timeout.ms=4000"
    async with source(shared_kafka, topic, options) as one:
        held = await receive(one, 40)
        async with source(shared_kafka, topic, options) as other:
            joining = asyncio.create_task(receive(other, 1))
            for start in range(0, 40, 10):
                for delivery in held[start : start + 10]:
                    await delivery.ack()
                assert not await one.receive(limit=1)
            more = [Message(topic, b"%d" % n, key=f"key {n}") for n in range(40, 80)]
            await publish(shared_kafka.url, *more)
            by_other = await joining
            by_one: list[Delivery] = []
            async with asyncio.timeout(60):
                while not set(range(40, 80)) <= set(payloads(by_one + by_other)):
                    by_one += await one.receive(limit=100)
                    by_other += await other.receive(limit=100)
            arrived = payloads(by_one + by_other)
            assert by_other
    # Unlike Kafka, on a busy machine the mock doesn't always commit while a group
    # rebalances: acked records can come again.
    assert sorted(n for n in arrived if n >= 40) == list(range(40, 80))


@pytest.mark.parametrize("strategy", ["cooperative-sticky", "range"])
async def test_a_partition_that_left_while_it_was_paused_is_read_when_it_returns(
    shared_kafka: Kafka, strategy: str
) -> None:
    topic = f"orders.{uuid4().hex}"
    shared_kafka.create_topic(topic, partitions=4)
    await publish(shared_kafka.url, *numbered(topic, 3000, keys=100))
    options = f"partition.assignment.strategy={strategy}"
    handled: set[int] = set()

    async def handle_all(consumer: KafkaSource, count: int) -> None:
        async with asyncio.timeout(60):
            while handled != set(range(count)):
                for delivery in await consumer.receive(limit=100):
                    await delivery.ack()
                    handled.add(int(delivery.message.payload))

    async with source(shared_kafka, topic, options) as one:
        held = await receive(one, 8, limit=8)
        # Wait for longer than the reader does before it pauses.
        await answer_after(2)
        async with source(shared_kafka, topic, options) as other:
            joining = asyncio.create_task(receive(other, 1))
            for delivery in held:
                await delivery.ack()
            handled |= set(payloads(held))
            await joining
        await handle_all(one, 3000)
        await publish(shared_kafka.url, *numbered(topic, 3100, keys=100)[3000:])
        await handle_all(one, 3100)


async def test_a_consumer_that_holds_a_partition_too_long_loses_it(
    shared_kafka: Kafka, topic: str
) -> None:
    await publish(shared_kafka.url, *numbered(topic, 3))
    async with source(shared_kafka, topic, "handover=0.1s") as slow:
        held = await receive(slow, 3)
        async with (
            source(shared_kafka, topic) as one,
            source(shared_kafka, topic) as other,
        ):
            # Of three replicas, the slow one can keep the partition until it leaves.
            await slow.__aexit__()
            again: list[Delivery] = []
            async with asyncio.timeout(60):
                while len(again) < 3:
                    again += await one.receive(limit=10)
                    again += await other.receive(limit=10)
            for delivery in again[:2]:
                await delivery.ack()
            for delivery in held:
                await delivery.ack()
            # Check before the two leave: a group in a rebalance can refuse a commit.
            async with asyncio.timeout(60):
                while await asyncio.to_thread(committed, shared_kafka, topic) < 0:
                    await answer_after(0.1)
    assert payloads(again) == [0, 1, 2]
    assert committed(shared_kafka, topic) == 2


@pytest.mark.variant
async def test_a_replica_that_another_with_its_instance_id_replaced_reads_again(
    real_node: RealKafka,
) -> None:
    topic = f"orders.{uuid4().hex}"
    real_node.create_topic(topic, partitions=1)
    same = "group.instance.id=one"
    async with source(real_node, topic, same) as old:
        await publish(real_node.url, *numbered(topic, 1))
        for delivery in await receive(old, 1):
            await delivery.ack()
        async with source(real_node, topic, same):
            with pytest.raises(BrokerUnavailableError, match="fenced"):
                await receive(old, 1)
        await publish(real_node.url, *numbered(topic, 1))
        (delivery,) = await receive_despite_losses(old, 1, limit=1)
        assert payloads([delivery]) == [0]


@pytest.mark.variant
async def test_a_topic_that_is_created_again_is_read_within_seconds(
    real_node: RealKafka,
) -> None:
    topic = f"orders.{uuid4().hex}"
    real_node.create_topic(topic, partitions=1)
    never = "allow.auto.create.topics=false"
    async with source(real_node, topic, never) as consumer:
        # More records than each new partition gets: see the page on Kafka.
        await publish(real_node.url, *numbered(topic, 100))
        for delivery in await receive(consumer, 100):
            await delivery.ack()
        real_node.create_topic(topic, partitions=4)
        await publish(real_node.url, *numbered(topic, 100, keys=100))
        assert sorted(payloads(await receive(consumer, 100))) == list(range(100))
