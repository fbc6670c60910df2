"""The memory publisher and source, by the suites that every adapter passes."""

from collections.abc import Sequence

import pytest
from typing_extensions import override

from outbox import Message
from relay.publishers.memory import MemoryPublisher
from relay.testing.publisher_suite import Capabilities, PublisherSuite


class TestMemoryPublisher(PublisherSuite):
    capabilities = Capabilities(
        limits_payload=False,
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
