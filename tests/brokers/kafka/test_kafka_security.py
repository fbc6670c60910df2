"""A real Kafka with TLS, SASL and the access rules that its page documents."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined] # has no __all__
    AclOperation,
    ResourceType,
)

from pillarbox import Message
from pillarbox.inbox.sources.kafka import KafkaSource
from pillarbox.outbox.errors import ConfigError
from pillarbox.relay.publisher import Acked, Nacked
from pillarbox.relay.publishers.kafka import KafkaPublisher
from tests.fixtures.real_kafka import USERS, RealKafka, secure_kafka

pytestmark = [pytest.mark.variant, pytest.mark.slow]


@pytest.fixture(scope="module")
def secure() -> Iterator[tuple[RealKafka, Path]]:
    with secure_kafka() as running:
        yield running


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", "PLAIN"])
async def test_users_with_the_documented_rights_publish_and_read(
    secure: tuple[RealKafka, Path], mechanism: str
) -> None:
    node, certificate = secure
    topic, group = f"orders-{mechanism}", f"billing-{mechanism}"
    node.create_topic(topic, partitions=1)

    def url_of(user: str, password: str) -> str:
        options = f"ssl.ca.location={certificate}&sasl.mechanism={mechanism}"
        return f"kafka://{user}:{password}@127.0.0.1:{node.proxied_port}/?{options}"

    message = Message(topic, b"1", key="k")
    with pytest.raises(ConfigError, match="rejected the connection"):
        async with KafkaPublisher(url_of("relay", "wrong")):
            pass
    relay, reader = (url_of(user, word) for user, word in USERS.items())
    async with KafkaPublisher(relay) as publisher:
        (refused,) = await publisher.publish([message])
    assert isinstance(refused, Nacked)
    with pytest.raises(ConfigError, match="grant this user read access"):
        async with KafkaSource(reader, consumer=group, topics=[topic]):
            pass

    describe, write, read = (
        AclOperation.DESCRIBE,
        AclOperation.WRITE,
        AclOperation.READ,
    )
    node.add_rule(ResourceType.TOPIC, topic, describe, write, user="relay")
    node.add_rule(ResourceType.TOPIC, topic, describe, read, user="reader")
    node.add_rule(ResourceType.GROUP, group, describe, read, user="reader")
    async with KafkaPublisher(relay) as publisher:
        assert await publisher.publish([message]) == [Acked()]
    async with (
        KafkaSource(reader, consumer=group, topics=[topic]) as source,
        asyncio.timeout(60),
    ):
        while not (deliveries := await source.receive(limit=1)):
            pass
        assert deliveries[0].message.id == message.id
        await deliveries[0].ack()
