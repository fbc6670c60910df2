"""The http publisher passes the suite for every adapter."""

import asyncio
from collections.abc import Sequence

import pytest
from aiohttp import web
from typing_extensions import override

from pillarbox import Message
from pillarbox.relay.publishers.http import HttpPublisher
from pillarbox.relay.testing.publisher_suite import Capabilities, PublisherSuite
from tests.fixtures.http import Arrival, Target, take
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.through_proxy import ThroughProxy
from tests.fixtures.waiting import wait_for


class TestHttpPublisher(ThroughProxy, PublisherSuite):
    capabilities = Capabilities()

    @pytest.fixture(autouse=True)
    def broker(self, target: Target, proxy: MakeProxy) -> None:
        self.target = target
        self.proxy, self.url = proxy(target.url())

    @override
    def publisher(self) -> HttpPublisher:
        limit = f"max_payload_bytes={self.max_payload_bytes}"
        return HttpPublisher.from_url(f"{self.url}&{limit}")

    @override
    async def received(self, topic: str, count: int) -> Sequence[Message]:
        def enough() -> bool:
            return len({m.id for m in self.target.messages(topic)}) >= count

        await asyncio.to_thread(wait_for, f"{count} in {topic}", enough)
        return self.target.messages(topic)

    @override
    async def refused_message(self) -> Message:
        refused = self.topic()

        async def script(arrival: Arrival) -> web.StreamResponse:
            if arrival.message().topic == refused:
                return web.Response(status=500, text="not today")
            return await take(arrival)

        self.target.script = script
        return Message(refused, b"1")
