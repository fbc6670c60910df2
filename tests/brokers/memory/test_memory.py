"""The memory publisher and source pass the suites for every adapter."""

from collections.abc import Sequence
from datetime import timedelta

import pytest
from typing_extensions import override

from pillarbox import Message
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.inbox.testing.source_suite import Capabilities as SourceCapabilities
from pillarbox.inbox.testing.source_suite import SourceSuite
from pillarbox.relay.publishers.memory import MemoryPublisher
from pillarbox.relay.testing.publisher_suite import Capabilities, PublisherSuite


class TestMemoryPublisher(PublisherSuite):
    capabilities = Capabilities(
        refuses_for_ever=False,
        refuses_alone=False,
        goes_away=False,
        stalls=False,
    )

    @pytest.fixture(autouse=True)
    def broker(self) -> None:
        self.made: list[MemoryPublisher] = []

    @override
    def publisher(self) -> MemoryPublisher:
        self.made.append(MemoryPublisher.from_url("memory://"))
        return self.made[-1]

    @override
    async def received(self, topic: str, count: int) -> Sequence[Message]:
        found = [m for each in self.made for m in each.messages if m.topic == topic]
        assert len({m.id for m in found}) >= count
        return found


class TestMemorySource(SourceSuite):
    capabilities = SourceCapabilities(
        reads_ahead=True,
        dates_deliveries=False,
        holds_back_keys=False,
        shares=False,
        fans_out=False,
        survives_a_crash=False,
        gets_foreign_messages=False,
        takes_bytes=False,
        takes_bytes_as_topic=False,
        goes_away=False,
        stalls=False,
    )
    hold = 0.5  # nothing here ends after a time

    @pytest.fixture(autouse=True)
    def broker(self) -> None:
        self.made = MemorySource(poll_interval=timedelta(milliseconds=50))

    @override
    def source(self, consumer: str, topic: str) -> MemorySource:
        return self.made

    @override
    async def put(self, *messages: Message) -> None:
        self.made.add(*messages)
