"""Behaviour specific to the Kafka publisher: URLs, partitions and refusals."""

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import KafkaError, murmur2

from pillarbox import Message
from pillarbox.outbox.brokers.kafka.connection import kafka_config
from pillarbox.outbox.errors import BrokerTimeoutError
from pillarbox.outbox.testing.samples import numbered
from pillarbox.relay.publisher import Acked, Confirmation, Nacked
from pillarbox.relay.publishers.kafka import KafkaPublisher
from tests.fixtures.kafka import Kafka, messages, records
from tests.fixtures.waiting import answer_after
from tests.servers.kafka import PRODUCE, KafkaCluster, kafka_cluster

NEVER_CREATE = "?allow.auto.create.topics=false"
NOBODY = -1


@pytest.fixture
def topic() -> str:
    return f"orders-{uuid4().hex}"


async def publish(kafka: Kafka, *batch: Message) -> list[Confirmation]:
    async with KafkaPublisher(kafka.url) as publisher:
        return list(await publisher.publish(batch))


async def test_a_record_is_a_cloud_event(shared_kafka: Kafka, topic: str) -> None:
    message = Message(
        topic, {"n": 1}, key="ä", tenant="acme", headers={"traceparent": "00-1-2-01"}
    )
    assert await publish(shared_kafka, message) == [Acked()]
    (record,) = records(shared_kafka.url, topic, 1)
    assert (record.key(), record.value()) == ("ä".encode(), message.payload)
    headers = dict(record.headers() or [])
    assert headers.pop("ce_time")
    assert headers == {
        "traceparent": b"00-1-2-01",
        "content-type": b"application/json",
        "ce_specversion": b"1.0",
        "ce_id": str(message.id).encode(),
        "ce_source": b"urn:pillarbox",
        "ce_type": topic.encode(),
        "ce_schemaversion": b"1",
        "ce_partitionkey": "ä".encode(),
        "ce_tenant": b"acme",
    }


async def test_a_key_gets_the_partition_that_java_gives_it_and_others_are_spread(
    shared_kafka: Kafka, topic: str
) -> None:
    shared_kafka.create_topic(topic, partitions=7)
    await publish(shared_kafka, *numbered(topic, 50, keys=50))
    async with KafkaPublisher(shared_kafka.url) as publisher:
        for _ in range(30):
            await publisher.publish([Message(topic, b"")])
    spread: set[int | None] = set()
    for record in records(shared_kafka.url, topic, 80):
        if (key := record.key()) is None:
            spread.add(record.partition())
        else:
            assert record.partition() == murmur2(key, 7)
    assert len(spread) > 1


@pytest.mark.parametrize("name", ["a/b", "ä", "with space", "..", "x" * 250])
async def test_an_invalid_topic_name_is_nacked_permanently(
    shared_kafka: Kafka, topic: str, name: str
) -> None:
    first, bad, last = await publish(
        shared_kafka,
        Message(topic, b"", key="k"),
        Message(name, b"", key="k"),
        Message(topic, b"", key="k"),
    )
    assert first == last == Acked()
    assert isinstance(bad, Nacked)
    assert bad.permanent
    assert "isn't a valid Kafka topic" in bad.reason


async def test_headers_count_towards_the_size_limit_of_a_record(
    shared_kafka: Kafka, topic: str
) -> None:
    large = Message(topic, bytes(900), headers={"x": "ä" * 300})
    small = Message(topic, bytes(900))
    url = f"{shared_kafka.url}/?message.max.bytes=1600"
    async with KafkaPublisher(url) as publisher:
        refused, taken = await publisher.publish([large, small])
    assert isinstance(refused, Nacked)
    assert refused.permanent
    assert "the limit is 1600 (message.max.bytes)" in refused.reason
    assert taken == Acked()


async def test_a_refused_topic_holds_back_the_later_messages_of_the_key(
    private_kafka: Kafka, topic: str
) -> None:
    private_kafka.create_topic("secret", partitions=1)
    private_kafka.fail_topic("secret", KafkaError.TOPIC_AUTHORIZATION_FAILED)
    batch = [
        Message(topic, b"1", key="a"),
        Message("secret", b"2", key="a"),
        Message(topic, b"3", key="a"),
        Message(topic, b"4", key="b"),
        Message(topic, b"5"),
    ]
    first, refused, behind, *others = await publish(private_kafka, *batch)
    assert [first, *others] == [Acked()] * 3
    assert isinstance(refused, Nacked)
    assert isinstance(behind, Nacked)
    assert not refused.permanent
    assert "topic secret" in refused.reason
    assert not behind.permanent
    arrived = messages(private_kafka.url, topic, 3)
    assert sorted(m.payload for m in arrived) == [b"1", b"4", b"5"]


async def test_a_missing_topic_is_nacked_until_it_exists(
    private_kafka: Kafka, topic: str
) -> None:
    url = f"{private_kafka.url}/{NEVER_CREATE}"
    async with KafkaPublisher(url) as publisher:
        (answer,) = await publisher.publish([Message(topic, b"")])
        assert isinstance(answer, Nacked)
        assert not answer.permanent
    private_kafka.create_topic(topic, partitions=1)
    assert await publish(private_kafka, Message(topic, b"")) == [Acked()]


async def test_a_deleted_topic_is_nacked_and_the_others_are_published(
    private_kafka: Kafka, topic: str
) -> None:
    deleted, other = f"deleted-{topic}", f"other-{topic}"
    for name in (deleted, other):
        private_kafka.create_topic(name, partitions=1)
    batch = [Message(deleted, b"", key="a"), Message(other, b"", key="b")]
    async with KafkaPublisher(f"{private_kafka.url}/{NEVER_CREATE}") as one:
        assert await one.publish(batch) == [Acked()] * 2
        private_kafka.delete_topic(deleted)
        for _ in range(2):
            nacked, acked = await one.publish(batch)
            assert acked == Acked()
            assert isinstance(nacked, Nacked)
            assert f"topic {deleted}" in nacked.reason
            assert not nacked.permanent
        private_kafka.create_topic(deleted, partitions=2)
        async with asyncio.timeout(60):
            while await one.publish(batch) != [Acked()] * 2:
                await answer_after(0.1)


def assert_postponed(
    batch: Sequence[Message], answers: Sequence[Confirmation], partition: int, why: str
) -> None:
    """Check that the messages of one partition were postponed, and the others acked."""
    for message, answer in zip(batch, answers, strict=True):
        if murmur2((message.key or "").encode(), 3) == partition:
            assert isinstance(answer, Nacked)
            assert answer.retry_after is not None
            assert why in answer.reason
        else:
            assert answer == Acked()
    assert any(answer != Acked() for answer in answers)


async def test_a_partition_without_a_leader_is_postponed_and_the_others_are_published(
    mock_kafka: KafkaCluster, topic: str
) -> None:
    mock_kafka.create_topic(topic, partitions=3)
    mock_kafka.lead(topic, 1, NOBODY)
    batch = numbered(topic, 20, keys=20)
    async with KafkaPublisher(mock_kafka.url) as publisher:
        answers = await publisher.publish(batch)
        assert_postponed(batch, answers, 1, "has no leader")
        mock_kafka.lead(topic, 1, 1)
        assert await publisher.publish(batch) == [Acked()] * 20


async def test_a_partition_whose_leader_fails_is_postponed_and_the_others_published(
    topic: str,
) -> None:
    with kafka_cluster(brokers=3) as kafka:
        kafka.create_topic(topic, partitions=3)
        for number in range(3):
            kafka.lead(topic, number, number + 1)
        batch = numbered(topic, 20, keys=20)
        async with KafkaPublisher(f"{kafka.url}/?timeout=3s") as publisher:
            assert await publisher.publish(batch) == [Acked()] * 20
            kafka.stop(3)
            answers = await publisher.publish(batch)
            assert_postponed(batch, answers, 2, "no answer within 3 s")
            kafka.start(3)
            assert await publisher.publish(batch) == [Acked()] * 20


async def test_only_a_message_that_is_refused_alone_costs_an_attempt(
    private_mock: KafkaCluster, topic: str
) -> None:
    private_mock.create_topic(topic, partitions=1)
    batch = numbered(topic, 20)
    refusals = [KafkaError.MSG_SIZE_TOO_LARGE] * 2
    # A request is sent only when it is full.
    in_one_request = f"{private_mock.url}/?linger.ms=900000&batch.num.messages=20"
    async with KafkaPublisher(in_one_request) as publisher:
        private_mock.refuse(PRODUCE, *refusals)
        answers = await publisher.publish(batch)
        refused = [n for n, answer in enumerate(answers) if answer != Acked()]
        assert len(refused) == 1
        (nacked,) = (answers[n] for n in refused)
        assert isinstance(nacked, Nacked)
        assert nacked.permanent
        assert "Message size too large" in nacked.reason
        more = numbered(topic, 20, start=20)
        assert await publisher.publish(more) == [Acked()] * 20
    arrived = messages(private_mock.url, topic, 39)
    numbers = [int(message.payload) for message in arrived]
    expected = [n for n in range(40) if n not in refused]
    assert list(dict.fromkeys(numbers)) == expected


async def test_the_publisher_waits_while_the_queue_is_full(
    shared_kafka: Kafka, topic: str
) -> None:
    url = f"{shared_kafka.url}/?queue.buffering.max.messages=10"
    async with KafkaPublisher(url) as publisher:
        assert await publisher.publish(numbered(topic, 500)) == [Acked()] * 500


async def test_an_answer_that_takes_too_long_is_reported(
    private_kafka: Kafka, topic: str
) -> None:
    publisher = KafkaPublisher(f"{private_kafka.url}?timeout=3s")
    async with publisher:
        assert await publisher.publish(numbered(topic, 1)) == [Acked()]
        private_kafka.freeze()
        try:
            with pytest.raises(BrokerTimeoutError, match="no answer within 3 s"):
                await publisher.publish(numbered(topic, 2))
        finally:
            private_kafka.thaw()


def test_a_user_in_the_url_means_scram_over_tls_and_is_never_shown() -> None:
    name, config = kafka_config("kafka://me:p%40ss@a:9093,b:9093", {})
    assert name == "kafka://a:9093,b:9093"
    expected: dict[str, Any] = {
        "bootstrap.servers": "a:9093,b:9093",
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "me",
        "sasl.password": "p@ss",
    }
    assert expected.items() <= config.items()
    _, config = kafka_config("kafka://me:x@a/?sasl.mechanism=PLAIN", {})
    assert config["sasl.mechanism"] == "PLAIN"
