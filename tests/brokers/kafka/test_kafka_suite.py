"""The kafka publisher and source pass the suites for every adapter."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import ClassVar

import pytest
from confluent_kafka import KafkaError, Producer
from typing_extensions import override

from pillarbox import Message
from pillarbox.inbox.sources.kafka import KafkaSource
from pillarbox.inbox.testing.source_suite import Capabilities as SourceCapabilities
from pillarbox.inbox.testing.source_suite import SourceSuite
from pillarbox.outbox.brokers.kafka.message import record_of
from pillarbox.relay.publishers.kafka import KafkaPublisher
from pillarbox.relay.testing.publisher_suite import Capabilities, PublisherSuite
from tests.fixtures.kafka import Kafka, behind, client_config, messages
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.through_proxy import ThroughProxy


class TestKafkaPublisher(ThroughProxy, PublisherSuite):
    capabilities = Capabilities()

    @pytest.fixture(autouse=True)
    def broker(self, private_kafka: Kafka, proxy: MakeProxy) -> None:
        self.kafka = private_kafka
        self.proxy, self.url = behind(proxy, private_kafka)

    @override
    def publisher(self) -> KafkaPublisher:
        return KafkaPublisher(f"{self.url}/?max_payload_bytes={self.max_payload_bytes}")

    @override
    async def received(self, topic: str, count: int) -> Sequence[Message]:
        return messages(self.kafka.url, topic, count)

    @override
    async def refused_message(self) -> Message:
        topic = self.topic()
        self.kafka.create_topic(topic, partitions=1)
        self.kafka.fail_topic(topic, KafkaError.TOPIC_AUTHORIZATION_FAILED)
        return Message(topic, b"1")


class TestKafkaSource(ThroughProxy, SourceSuite):
    kind: ClassVar[str] = "private_mock"
    capabilities = SourceCapabilities(
        reads_ahead=True,
        acks_each=False,
        counts_attempts=False,
        hands_back=False,
        takes_bytes_as_topic=False,
        # While a replica joins, Kafka lets the others commit; the mock doesn't.
        joins_quietly=False,
    )
    hold = 2.0  # after a member leaves, the mock makes a new member wait for this long
    answer_timeout = 60.0  # librdkafka's default
    session = hold  # seconds until a replica without heartbeats counts as dead

    @pytest.fixture(autouse=True)
    def broker(
        self,
        request: pytest.FixtureRequest,
        proxy: MakeProxy,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Iterator[None]:
        self.monkeypatch = monkeypatch
        private_kafka: Kafka = request.getfixturevalue(self.kind)
        self.kafka = private_kafka
        self.proxy, self.url = behind(proxy, private_kafka)
        self.producer = Producer(
            client_config(private_kafka.url)
            | {"linger.ms": 0, "partitioner": "murmur2_random"}
            | {"message.max.bytes": 1024 * 1024}
        )
        yield
        self.producer.purge()

    @override
    def source(self, consumer: str, topic: str) -> KafkaSource:
        session = int(self.session * 1000)
        return KafkaSource(
            f"{self.url}/?session.timeout.ms={session}&heartbeat.interval.ms=400"
            f"&socket.timeout.ms={int(self.answer_timeout * 1000)}",
            consumer=consumer,
            topics=[topic],
            poll_interval=timedelta(milliseconds=100),
        )

    @override
    async def prepare(self, topic: str, *consumers: str) -> None:
        # A new group starts with the oldest records, so none has to join before. One
        # that joins and leaves at once remains a member for the mock until its session
        # ends, and keeps the others waiting.
        self.kafka.create_topic(topic, partitions=4)

    @override
    def test_a_stall_is_reported_and_loses_nothing(self) -> None:
        self.answer_timeout = 3.0
        super().test_a_stall_is_reported_and_loses_nothing()

    @override
    def test_a_source_can_be_left_while_the_broker_stalls(self) -> None:
        self.monkeypatch.setattr("pillarbox.inbox.sources.kafka.reader._LAST_WAIT", 2.0)
        super().test_a_source_can_be_left_while_the_broker_stalls()

    @override
    def test_replicas_share_and_nothing_is_handled_twice(self) -> None:
        # No replica dies here, and even on a busy machine none may count as dead.
        self.session = 5.0
        super().test_replicas_share_and_nothing_is_handled_twice()

    @override
    async def put(self, *put: Message) -> None:
        for message in put:
            topic, key, value, headers = record_of(message)
            self.producer.produce(topic, value, key, headers=list(headers.items()))
        assert self.producer.flush(60) == 0

    @override
    async def put_foreign(self, topic: str, payload: bytes) -> None:
        self.producer.produce(topic, payload)
        assert self.producer.flush(60) == 0

    @override
    async def put_raw_header(self, topic: str, metadata: bytes) -> None:
        self.producer.produce(topic, b"1", headers=[("raw", metadata)])
        assert self.producer.flush(60) == 0


@pytest.mark.variant
class TestRealKafkaSource(TestKafkaSource):
    capabilities = replace(TestKafkaSource.capabilities, joins_quietly=True)
    kind = "private_node"
