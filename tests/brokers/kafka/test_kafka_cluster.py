"""Three nodes of a real Kafka, one of which dies."""

import asyncio
from collections.abc import Iterator, Sequence
from uuid import uuid4

import pytest

from pillarbox import Message
from pillarbox.relay.publisher import Acked, Confirmation, Nacked
from pillarbox.relay.publishers.kafka import KafkaPublisher
from tests.fixtures.kafka import messages
from tests.fixtures.real_kafka import RealKafka, real_cluster
from tests.fixtures.waiting import wait_for

pytestmark = [pytest.mark.fault, pytest.mark.variant, pytest.mark.timeout(900)]

KEYS = 30


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RealKafka]]:
    with real_cluster(
        **{
            "default.replication.factor": "3",
            "min.insync.replicas": "2",
            "offsets.topic.replication.factor": "3",
            "auto.create.topics.enable": "false",
            "broker.session.timeout.ms": "6000",
        }
    ) as running:
        yield running


def leaders(nodes: Sequence[RealKafka], topic: str) -> list[int]:
    partitions = nodes[0].admin.list_topics(topic, timeout=30).topics[topic].partitions
    return [each.leader for _, each in sorted(partitions.items())]


def batch(topic: str, first: int) -> list[Message]:
    return [
        Message(topic, b"%d" % n, key=f"key {n % KEYS}")
        for n in range(first, first + 300)
    ]


async def test_a_leader_that_is_killed_loses_nothing_and_keys_keep_their_order(
    nodes: list[RealKafka],
) -> None:
    topic = f"orders-{uuid4().hex}"
    nodes[0].create_topic(topic, partitions=4)
    victim = nodes[1]
    async with KafkaPublisher(f"{nodes[0].url}/?timeout=60s") as publisher:
        assert await publisher.publish(batch(topic, 0)) == [Acked()] * 300
        sending = asyncio.create_task(publisher.publish(batch(topic, 300)))
        await asyncio.to_thread(victim.kill)
        try:
            assert await sending == [Acked()] * 300
            assert await publisher.publish(batch(topic, 600)) == [Acked()] * 300
        finally:
            await asyncio.to_thread(victim.start)
    arrived: dict[str | None, list[int]] = {}
    for message in messages(nodes[0].url, topic, 900):
        arrived.setdefault(message.key, []).append(int(message.payload))
    assert len(arrived) == KEYS
    for number, key in enumerate(sorted(arrived, key=lambda key: int(str(key)[4:]))):
        # What an idempotent producer sends again is stored once.
        assert arrived[key] == list(range(number, 900, KEYS))


async def test_partitions_whose_only_replica_is_dead_hold_up_no_others(
    nodes: list[RealKafka],
) -> None:
    topic = f"orders-{uuid4().hex}"
    nodes[0].create_topic(topic, partitions=3, replicas=1)
    victim = nodes[2]
    assert sorted(leaders(nodes, topic)) == [1, 2, 3]

    def orphaned(answers: Sequence[Confirmation]) -> set[str]:
        return {
            answer.reason
            for answer in answers
            if isinstance(answer, Nacked) and answer.retry_after is not None
        }

    async with KafkaPublisher(f"{nodes[0].url}/?timeout=5s") as publisher:
        assert await publisher.publish(batch(topic, 0)) == [Acked()] * 300
        await asyncio.to_thread(victim.kill)
        try:
            answers = await publisher.publish(batch(topic, 300))
            assert orphaned(answers) == {"no answer within 5 s"}
            wait_for("it has no leader", lambda: -1 in leaders(nodes, topic))
            reasons = {"no answer within 5 s"}
            async with asyncio.timeout(60):
                # The client learns it from the other nodes, later on a busy machine.
                while reasons == {"no answer within 5 s"}:
                    answers = await publisher.publish(batch(topic, 300))
                    reasons = orphaned(answers)
            assert all("has no leader" in reason for reason in reasons)
            assert answers.count(Acked()) > 150
        finally:
            await asyncio.to_thread(victim.start)
        wait_for("it has a leader", lambda: -1 not in leaders(nodes, topic))
        assert await publisher.publish(batch(topic, 300)) == [Acked()] * 300


async def test_a_topic_with_too_few_replicas_holds_up_no_others(
    nodes: list[RealKafka],
) -> None:
    strict, other = (f"{name}-{uuid4().hex}" for name in ("strict", "other"))
    needs_all = {"min.insync.replicas": "3"}
    nodes[0].create_topic(strict, partitions=1, settings=needs_all)
    nodes[0].create_topic(other, partitions=1)
    led_by = leaders(nodes, strict) + leaders(nodes, other)
    victim = next(node for node in nodes if node.number not in led_by)
    both = [Message(strict, b"", key="a"), Message(other, b"", key="b")]
    # Kafka needs some ten seconds to notice that a node is dead, a busy machine more.
    async with KafkaPublisher(f"{nodes[0].url}/?timeout=60s") as publisher:
        assert await publisher.publish(both) == [Acked()] * 2
        await asyncio.to_thread(victim.kill)
        try:
            postponed, acked = await publisher.publish(both)
        finally:
            await asyncio.to_thread(victim.start)
        assert acked == Acked()
        assert isinstance(postponed, Nacked)
        assert postponed.retry_after is not None
        async with asyncio.timeout(120):
            while await publisher.publish(both) != [Acked()] * 2:
                pass
