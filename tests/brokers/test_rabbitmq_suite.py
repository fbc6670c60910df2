"""The RabbitMQ publisher and source, by the suites that every adapter passes."""

from collections.abc import Sequence

import pytest
from typing_extensions import override

from outbox import Message
from relay.publishers.rabbitmq import RabbitMQPublisher
from relay.testing.publisher_suite import Capabilities, PublisherSuite
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.rabbitmq import bind, drain


class TestRabbitMQPublisher(PublisherSuite):
    capabilities = Capabilities()

    @pytest.fixture(autouse=True)
    def broker(self, rabbitmq_url: str, proxy: MakeProxy) -> None:
        self.direct = rabbitmq_url
        self.proxy, self.url = proxy(rabbitmq_url)

    @override
    def publisher(self) -> RabbitMQPublisher:
        limit = f"max_payload_bytes={self.max_payload_bytes}"
        return RabbitMQPublisher.from_url(f"{self.url}&{limit}")

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
