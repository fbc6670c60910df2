"""The redis publisher and source, by the suites that every adapter passes."""

from collections.abc import Sequence

import pytest
from redis import Redis
from typing_extensions import override

from outbox import Message
from outbox.wire import from_fields
from relay.publishers.redis import RedisPublisher
from relay.testing.publisher_suite import Capabilities, PublisherSuite
from tests.fixtures.proxy import MakeProxy


class TestRedisPublisher(PublisherSuite):
    capabilities = Capabilities()

    @pytest.fixture(autouse=True)
    def broker(self, redis_url: str, proxy: MakeProxy) -> None:
        self.direct = redis_url
        self.proxy, self.url = proxy(redis_url)

    @override
    def publisher(self) -> RedisPublisher:
        limit = f"max_payload_bytes={self.max_payload_bytes}"
        return RedisPublisher.from_url(f"{self.url}?{limit}")

    @override
    async def received(self, topic: str, count: int) -> Sequence[Message]:
        with Redis.from_url(self.direct, protocol=2) as client:
            entries = client.xrange(topic)
        found = [from_fields(fields) for _, fields in entries]
        assert len({message.id for message in found}) >= count
        return found

    @override
    async def refused_message(self) -> Message:
        with Redis.from_url(self.direct) as client:
            client.set("taken", "x")
        return Message("taken", b"1")

    @override
    def stop_broker(self) -> None:
        self.proxy.refuse()

    @override
    def start_broker(self) -> None:
        self.proxy.accept()

    @override
    def cut_connections(self) -> None:
        self.proxy.cut()

    @override
    def stall_broker(self) -> None:
        self.proxy.stall()

    @override
    def resume_broker(self) -> None:
        self.proxy.resume()
