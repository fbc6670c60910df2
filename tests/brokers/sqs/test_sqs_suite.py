"""The sqs publisher and source pass the suites for every adapter."""

from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar

import pytest
from typing_extensions import override

from pillarbox import Message
from pillarbox.inbox.sources.sqs import SqsSource
from pillarbox.inbox.testing.source_outage import SourceOutage
from pillarbox.inbox.testing.source_settling import SourceSettling
from pillarbox.inbox.testing.source_sharing import SourceSharing
from pillarbox.inbox.testing.source_suite import Capabilities as SourceCapabilities
from pillarbox.inbox.testing.source_suite import SourceSuite
from pillarbox.outbox.brokers.sqs.connection import SqsSettings
from pillarbox.outbox.testing.conformance import checks
from pillarbox.outbox.testing.samples import MAX_PAYLOAD_BYTES, numbered
from pillarbox.relay.publisher import Acked
from pillarbox.relay.publishers.sqs import SqsPublisher
from pillarbox.relay.testing.publisher_answers import PublisherAnswers
from pillarbox.relay.testing.publisher_outage import PublisherOutage
from pillarbox.relay.testing.publisher_suite import Capabilities, PublisherSuite
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.sqs import Aws
from tests.fixtures.through_proxy import ThroughProxy
from tests.servers.sqs import SqsServer

# 256 KiB less room for attributes; binary payloads are sent as base64.
SNS_PAYLOAD_BYTES = (256 - 16) * 1024 * 3 // 4


class SqsPublisherCase(ThroughProxy, PublisherAnswers, PublisherOutage):
    """Tests in which the kinds of queues and topics can differ."""

    capabilities = Capabilities(ordered_by_key=False)

    # Binary payloads are sent as base64, which turns three bytes into four.
    max_payload_bytes = MAX_PAYLOAD_BYTES * 3 // 4
    scheme: ClassVar[str] = "sqs"
    fifo: ClassVar[str] = ""

    @pytest.fixture(autouse=True)
    def broker(self, shared_sqs: SqsServer, aws: Aws, proxy: MakeProxy) -> None:
        self.aws = aws
        self.proxy, through = proxy(shared_sqs.endpoint_url)
        self.url = shared_sqs.url(self.scheme, endpoint_url=through)

    @override
    def publisher(self) -> SqsPublisher:
        options = f"fifo={'true' if self.fifo else 'false'}"
        limit = f"max_payload_bytes={self.max_payload_bytes}"
        return SqsPublisher.from_url(f"{self.url}&{options}&{limit}")

    @override
    async def prepare(self, topic: str) -> None:
        await self.aws.create_queue(topic + self.fifo)

    @override
    async def received(self, topic: str, count: int) -> Sequence[Message]:
        return await self.aws.received(topic + self.fifo, count)

    @override
    async def refused_message(self) -> Message:
        return Message(self.topic(), b"1")


@pytest.mark.variant
class TestSqsStandardPublisher(SqsPublisherCase):
    test_messages_arrive_unchanged = PublisherSuite.test_messages_arrive_unchanged


class TestSqsFifoPublisher(SqsPublisherCase, PublisherSuite):
    capabilities = Capabilities(deduplicates=True)

    fifo = ".fifo"


class SnsPublisherCase(SqsPublisherCase):
    scheme = "sns"
    max_payload_bytes = SNS_PAYLOAD_BYTES

    @override
    async def prepare(self, topic: str) -> None:
        await self.aws.subscribe(topic + self.fifo, topic + self.fifo)


@pytest.mark.variant
class TestSnsStandardPublisher(SnsPublisherCase):
    test_messages_arrive_unchanged = PublisherSuite.test_messages_arrive_unchanged


class TestSnsFifoPublisher(SnsPublisherCase):
    fifo = ".fifo"

    test_messages_arrive_unchanged = PublisherSuite.test_messages_arrive_unchanged


@pytest.mark.variant
class TestSnsFifoPublisherInFull(SnsPublisherCase, PublisherSuite):
    capabilities = Capabilities(deduplicates=True)

    fifo = ".fifo"


class SqsSourceCase(ThroughProxy, SourceSettling):
    """Tests in which queue types can differ, except slow ones with time limits."""

    # Each consumer has its own queue for a topic, which SNS fills.
    capabilities = SourceCapabilities(
        ordered_by_key=False, holds_back_keys=False, takes_bytes_as_topic=False
    )

    hold = 4.0
    answer_timeout = 10.0
    max_payload_bytes = SNS_PAYLOAD_BYTES
    end: ClassVar[str] = ""

    @pytest.fixture(autouse=True)
    def broker(self, shared_sqs: SqsServer, aws: Aws, proxy: MakeProxy) -> None:
        self.aws = aws
        self.proxy, through = proxy(shared_sqs.endpoint_url)
        options = f"&fifo={'true' if self.end else 'false'}"
        self.direct = shared_sqs.url("sns") + options
        self.url = shared_sqs.url("sns", endpoint_url=through) + options

    @override
    def source(self, consumer: str, topic: str) -> SqsSource:
        return SqsSource(
            SqsSettings.from_url(f"{self.url}&wait=1s&visibility={self.hold:g}s"),
            consumer=consumer,
            topics=[topic],
            poll_interval=timedelta(milliseconds=100),
            answer_timeout=timedelta(seconds=self.answer_timeout),
            leave_timeout=timedelta(seconds=2),
        )

    @override
    async def prepare(self, topic: str, *consumers: str) -> None:
        for consumer in consumers:
            await self.aws.subscribe(topic + self.end, f"{consumer}-{topic}{self.end}")

    @override
    async def put(self, *messages: Message) -> None:
        async with SqsPublisher.from_url(self.direct) as publisher:
            assert await publisher.publish(messages) == [Acked()] * len(messages)

    @override
    @checks()
    async def test_an_ack_removes_the_message_and_may_be_repeated(self) -> None:
        # SQS hands out at most ten unsettled messages of a group.
        topic = await self.fresh_topic()
        await self.put(*numbered(topic, 20, keys=20))
        async with self.source("one", topic) as source:
            for delivery in await self.receive(source, 20):
                await delivery.ack()
                await delivery.ack()
        async with self.source("one", topic) as source:
            assert not await self.anything(source)

    @override
    async def put_foreign(self, topic: str, payload: bytes) -> None:
        await self.aws.put_foreign(f"one-{topic}{self.end}", payload)

    @override
    async def put_raw_header(self, topic: str, metadata: bytes) -> None:
        raw = {"DataType": "Binary", "BinaryValue": metadata}
        await self.aws.put_foreign(f"one-{topic}{self.end}", b"1", raw=raw)


class SqsOutageCase(SqsSourceCase, SourceSharing, SourceOutage):
    """Tests in which queue types can differ, including slow ones with time limits."""

    @override
    def test_a_stall_is_reported_and_loses_nothing(self) -> None:
        self.answer_timeout = 3.0
        super().test_a_stall_is_reported_and_loses_nothing()


@pytest.mark.variant
class TestSqsStandardOutage(SqsOutageCase):
    pass


class TestSqsStandardSource(SqsSourceCase):
    test_messages_are_delivered_unchanged = (
        SourceSuite.test_messages_are_delivered_unchanged
    )


class TestSqsFifoSource(SqsOutageCase, SourceSuite):
    capabilities = SourceCapabilities(takes_bytes_as_topic=False)

    end = ".fifo"
