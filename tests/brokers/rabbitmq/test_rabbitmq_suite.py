"""The RabbitMQ publisher and source pass the suites for every adapter."""

from collections.abc import Sequence
from datetime import timedelta

import pytest
from pika import BasicProperties
from typing_extensions import override

from pillarbox import Message
from pillarbox.inbox.sources.rabbitmq import RabbitMQSource
from pillarbox.inbox.testing.source_outage import SourceOutage
from pillarbox.inbox.testing.source_settling import SourceSettling
from pillarbox.inbox.testing.source_sharing import SourceSharing
from pillarbox.inbox.testing.source_suite import Capabilities as SourceCapabilities
from pillarbox.inbox.testing.source_suite import SourceSuite
from pillarbox.outbox.brokers.rabbitmq.message import to_properties
from pillarbox.relay.publishers.rabbitmq import RabbitMQPublisher
from pillarbox.relay.testing.publisher_suite import Capabilities, PublisherSuite
from tests.fixtures.rabbitmq import bind, channel_of, drain, exchange_of, put_bytes
from tests.fixtures.through_proxy import ProxiedUrl


class TestRabbitMQPublisher(ProxiedUrl, PublisherSuite):
    server = "rabbitmq_url"
    capabilities = Capabilities()

    @override
    def publisher(self) -> RabbitMQPublisher:
        limit = f"max_payload_bytes={self.max_payload_bytes}"
        return RabbitMQPublisher(f"{self.url}&{limit}")

    @override
    async def prepare(self, topic: str) -> None:
        bind(self.direct, topic)

    @override
    async def received(self, topic: str, count: int) -> Sequence[Message]:
        return drain(self.direct, topic, count)

    @override
    async def refused_message(self) -> Message:
        topic = self.topic()
        bind(self.direct, topic, {"x-max-length": 0, "x-overflow": "reject-publish"})
        return Message(topic, b"1")


class RabbitMQSourceCase(ProxiedUrl, SourceSettling):
    """Tests in which queue types can differ, except slow ones with time limits."""

    server = "rabbitmq_url"
    capabilities = SourceCapabilities(shares=False, one_receives=True, reads_ahead=True)
    options = ""
    # Long enough that a client that hangs briefly doesn't count as a stalled broker.
    heartbeat = 20
    hold = 0.5  # for RabbitMQ, a delivery in progress stays so for half an hour

    @pytest.fixture(autouse=True)
    def constants(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    @override
    def source(self, consumer: str, topic: str) -> RabbitMQSource:
        source = RabbitMQSource(
            f"{self.url}&heartbeat={self.heartbeat}&queue={consumer}-{topic}"
            f"{self.options}",
            consumer=consumer,
            topics=[topic],
            poll_interval=timedelta(milliseconds=100),
        )
        if self.capabilities.shares and "shards" not in self.options:
            source.abilities.share()
        return source

    @override
    async def put(self, *messages: Message) -> None:
        with channel_of(self.direct) as channel:
            channel.confirm_delivery()
            for message in messages:
                channel.basic_publish(
                    exchange_of(self.direct),
                    message.topic,
                    message.payload,
                    to_properties(message),
                    mandatory=True,
                )

    @override
    async def put_foreign(self, topic: str, payload: bytes) -> None:
        properties = BasicProperties(  # type: ignore[no-untyped-call]
            headers={"n": 1, "nested": {"a": [None, b"\xff"]}}
        )
        with channel_of(self.direct) as channel:
            channel.basic_publish(exchange_of(self.direct), topic, payload, properties)

    @override
    async def put_raw_header(self, topic: str, metadata: bytes) -> None:
        properties = BasicProperties(headers={"raw": metadata})  # type: ignore[no-untyped-call]
        with channel_of(self.direct) as channel:
            channel.basic_publish(exchange_of(self.direct), topic, b"1", properties)

    @override
    async def put_raw_topic(self, topic: bytes) -> None:
        put_bytes(self.direct, topic, b"1")


class RabbitMQOutageCase(RabbitMQSourceCase, SourceSharing, SourceOutage):
    """Tests in which queue types can differ, including slow ones with time limits."""

    @override
    def test_a_stall_is_reported_and_loses_nothing(self) -> None:
        self.notice_a_stall_soon()
        super().test_a_stall_is_reported_and_loses_nothing()

    @override
    def test_a_source_can_be_left_while_the_broker_stalls(self) -> None:
        self.notice_a_stall_soon()
        super().test_a_source_can_be_left_while_the_broker_stalls()

    def notice_a_stall_soon(self) -> None:
        self.heartbeat = 2
        for wait, seconds in (("_ANSWER", 4.0), ("_CLOSE", 1.0)):
            self.monkeypatch.setattr(
                f"pillarbox.outbox.brokers.rabbitmq.amqp.{wait}", seconds
            )


class TestRabbitMQSource(RabbitMQOutageCase, SourceSuite):
    pass


@pytest.mark.variant
class TestRabbitMQSourceThatShares(RabbitMQOutageCase):
    capabilities = SourceCapabilities()


class TestRabbitMQSourceInShards(RabbitMQOutageCase, SourceSuite):
    capabilities = SourceCapabilities(
        hands_back=False, joins_quietly=False, reads_ahead=True
    )
    options = "&shards=3"


class TestRabbitMQSourceOfClassicQueue(RabbitMQSourceCase):
    options = "&queue_type=classic"

    test_messages_are_delivered_unchanged = (
        SourceSuite.test_messages_are_delivered_unchanged
    )


@pytest.mark.variant
class TestRabbitMQOutageOfClassicQueueThatIsShared(TestRabbitMQSourceThatShares):
    options = "&queue_type=classic"


@pytest.mark.variant
class TestRabbitMQOutageOfClassicQueue(RabbitMQOutageCase):
    options = "&queue_type=classic"


class TestRabbitMQSourceWithSingleActiveConsumer(RabbitMQSourceCase):
    capabilities = SourceCapabilities(shares=False)
    options = "&single_active_consumer=true"


@pytest.mark.variant
class TestRabbitMQOutageWithSingleActiveConsumer(RabbitMQOutageCase):
    capabilities = SourceCapabilities(shares=False)
    options = "&single_active_consumer=true"
