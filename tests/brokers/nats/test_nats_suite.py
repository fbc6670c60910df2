"""The NATS publisher and source pass the suites for every adapter."""

from collections.abc import Sequence
from datetime import timedelta
from uuid import uuid4

import pytest
from typing_extensions import override

from pillarbox import Message
from pillarbox.inbox.sources.nats import NatsSource
from pillarbox.inbox.testing.source_suite import Capabilities as SourceCapabilities
from pillarbox.inbox.testing.source_suite import SourceSuite
from pillarbox.relay.publisher import Acked
from pillarbox.relay.publishers.nats import NatsPublisher
from pillarbox.relay.testing.publisher_suite import Capabilities, PublisherSuite
from tests.fixtures.nats import make_stream, put_bytes, put_raw, stored
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.through_proxy import ThroughProxy
from tests.fixtures.urls import with_options
from tests.servers.nats import NatsServer


class TestNatsPublisher(ThroughProxy, PublisherSuite):
    capabilities = Capabilities(deduplicates=True)

    @pytest.fixture(autouse=True)
    def broker(
        self, shared_nats: NatsServer, nats_topics: str, proxy: MakeProxy
    ) -> None:
        self.direct, self.stream = shared_nats.url, nats_topics
        self.proxy, self.url = proxy(self.direct)

    @override
    def topic(self) -> str:
        return f"{self.stream}.{uuid4().hex}"

    @override
    def publisher(self) -> NatsPublisher:
        limit = f"max_payload_bytes={self.max_payload_bytes}"
        return NatsPublisher(f"{self.url}?{limit}")

    @override
    async def received(self, topic: str, count: int) -> Sequence[Message]:
        found = await stored(self.direct, self.stream, topic)
        assert len({message.id for message in found}) >= count
        return found

    @override
    async def refused_message(self) -> Message:
        name = f"full-{uuid4().hex}"
        await make_stream(self.direct, name, f"{name}.>", max_msgs=1, discard="new")
        await put_raw(self.direct, f"{name}.x", b"")
        return Message(f"{name}.x", b"1")


class TestNatsSource(ThroughProxy, SourceSuite):
    # The next reader begins above the ack floor.
    capabilities = SourceCapabilities(
        one_receives=True, reads_ahead=True, shares=False, acks_each=False
    )
    hold = 4.0

    @pytest.fixture(autouse=True)
    def broker(
        self,
        shared_nats: NatsServer,
        nats_topics: str,
        proxy: MakeProxy,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("pillarbox.inbox.sources.nats.source._LAST_WRITE", 2.0)
        self.direct, self.stream = shared_nats.url, nats_topics
        self.proxy, self.url = proxy(self.direct)

    @override
    def topic(self) -> str:
        return f"{self.stream}.{uuid4().hex}"

    @override
    def source(self, consumer: str, topic: str) -> NatsSource:
        return NatsSource(
            with_options(self.url, ack_wait=timedelta(seconds=self.hold)),
            consumer=consumer,
            topics=[topic],
            poll_interval=timedelta(milliseconds=100),
        )

    @override
    async def put(self, *messages: Message) -> None:
        async with NatsPublisher(self.direct) as publisher:
            assert await publisher.publish(messages) == [Acked()] * len(messages)

    @override
    async def try_to_put(self, message: Message) -> bool:
        # NATS allows few header names, and its publisher refuses the others.
        async with NatsPublisher(self.direct) as publisher:
            return list(await publisher.publish([message])) == [Acked()]

    @override
    async def put_foreign(self, topic: str, payload: bytes) -> None:
        await put_raw(self.direct, topic, payload)

    @override
    async def put_raw_header(self, topic: str, metadata: bytes) -> None:
        await put_bytes(self.direct, topic.encode(), b"1", {b"raw": metadata})

    @override
    async def put_raw_topic(self, topic: bytes) -> None:
        await put_bytes(self.direct, topic, b"1", {})


@pytest.mark.variant
class TestSharedNatsSource(TestNatsSource):
    # After a crash or a cut connection, what was held is redelivered late.
    capabilities = SourceCapabilities(ordered_by_key=False)

    @override
    def source(self, consumer: str, topic: str) -> NatsSource:
        source = super().source(consumer, topic)
        source.abilities.share()
        return source
