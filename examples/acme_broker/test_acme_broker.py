"""The conformance suites, run on the installed adapter, found by its URL scheme."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from typing_extensions import override

from acme_broker.publisher import MAX_PAYLOAD_BYTES
from acme_broker.queue import Queue
from acme_broker.source import AcmeSource
from pillarbox import Message
from pillarbox.inbox.source import Source
from pillarbox.inbox.testing.source_suite import Capabilities as SourceCapabilities
from pillarbox.inbox.testing.source_suite import SourceSuite
from pillarbox.outbox.brokers.plugins import implementation
from pillarbox.relay.publisher import Acked, Publisher
from pillarbox.relay.testing.publisher_suite import Capabilities, PublisherSuite


class Broker:
    """The directory; renaming it makes the broker unavailable."""

    @pytest.fixture(autouse=True)
    def broker(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "broker"
        self.directory.mkdir()
        self.url = f"acme://{self.directory}"

    def stop_broker(self) -> None:
        self.directory.rename(self.directory.with_name("away"))

    def start_broker(self) -> None:
        self.directory.with_name("away").rename(self.directory)


class TestAcmePublisher(Broker, PublisherSuite):
    capabilities = Capabilities(refuses_alone=False, stalls=False, deduplicates=True)
    max_payload_bytes = MAX_PAYLOAD_BYTES

    @override
    def publisher(self) -> Publisher:
        found = implementation("pillarbox.publishers", self.url)
        made: Publisher = found(self.url)
        return made

    @override
    async def received(self, topic: str, count: int) -> Sequence[Message]:
        source = AcmeSource(self.url, consumer="one", topics=[topic])
        async with source:
            found = [d.message for d in await source.receive(limit=10_000)]
        assert len(found) >= count
        return found


class TestAcmeSource(Broker, SourceSuite):
    capabilities = SourceCapabilities(
        takes_bytes=False,
        takes_bytes_as_topic=False,
        dates_deliveries=False,
        stalls=False,
    )
    max_payload_bytes = MAX_PAYLOAD_BYTES

    @override
    def source(self, consumer: str, topic: str) -> Source:
        return AcmeSource(
            self.url,
            consumer=consumer,
            topics=[topic],
            hold=timedelta(seconds=self.hold),
            poll_interval=timedelta(milliseconds=100),
        )

    @override
    async def put(self, *messages: Message) -> None:
        found = implementation("pillarbox.publishers", self.url)
        async with found(self.url) as publisher:
            assert await publisher.publish(messages) == [Acked()] * len(messages)

    @override
    async def put_foreign(self, topic: str, payload: bytes) -> None:
        queue = Queue(self.url)
        queue.create()
        with queue.transaction() as connection:
            connection.execute(
                "INSERT INTO message (id, topic, headers, payload)"
                " VALUES ('7', ?, '{}', ?)",
                (topic, payload),
            )
