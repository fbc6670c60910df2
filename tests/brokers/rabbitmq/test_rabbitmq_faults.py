"""The fault suite with RabbitMQ, for both kinds of queue."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
from typing_extensions import override

from tests.acceptance.broker_faults import (
    TO_BE_CUT,
    TOPIC,
    Arrival,
    BrokerFaults,
    by_first_appearance,
)
from tests.fixtures.rabbitmq import bind, channel_of, drain
from tests.servers.rabbitmq import RabbitMQServer

pytestmark = pytest.mark.fault


class RabbitMQFaults(BrokerFaults):
    kind: ClassVar[str] = "quorum"

    @pytest.fixture(autouse=True)
    def broker(self, private_rabbitmq: RabbitMQServer) -> Iterator[None]:
        self.server = private_rabbitmq
        self.make_queue({})
        yield
        with channel_of(self.broker_url()) as channel:
            channel.queue_delete(TOPIC)

    def make_queue(self, arguments: dict[str, Any]) -> None:
        with channel_of(self.broker_url()) as channel:
            channel.queue_delete(TOPIC)
        bind(self.broker_url(), TOPIC, {"x-queue-type": self.kind} | arguments)
        if self.kind == "quorum":
            self.server.write_names()

    @pytest.mark.timeout(300)
    def test_a_queue_that_rejects_costs_no_attempt_and_keeps_its_order(self) -> None:
        # The relay pauses whenever the queue is full, so more messages take minutes.
        self.count = 600
        self.make_queue({"x-max-length": 120, "x-overflow": "reject-publish"})
        relay = self.drain("--strict-order")
        relay.wait_for_log("is full or not available", times=3)
        self.proxy.slow(0)
        arrivals = self.arrivals()
        assert by_first_appearance(arrivals) == self.writer.numbers()
        assert len(arrivals) == self.count
        self.inspection.wait_until_settled()
        assert self.inspection.charged() == 0
        assert "MessageRefused" not in relay.log()

    @override
    def broker_url(self) -> str:
        return f"{self.server.url}?exchange=numbers"

    @override
    def arrivals(self) -> Sequence[Arrival]:
        messages = drain(self.broker_url(), TOPIC, self.writer.added, seconds=120)
        return [(str(m.id), m.key or "", int(m.payload)) for m in messages]

    @override
    def kill(self) -> None:
        self.server.kill()

    @override
    def start(self) -> None:
        self.server.start()


class TestRabbitMQ(RabbitMQFaults):
    @pytest.mark.timeout(300)
    def test_an_alarm_of_memory_or_disk_costs_no_attempt(self) -> None:
        relay = self.drain()
        for what, set_limit, alarm, calm in (
            (
                "memory",
                "vm_memory_monitor:set_vm_memory_high_watermark",
                "0.00001",
                "0.4",
            ),
            (
                "disk",
                "rabbit_disk_monitor:set_disk_free_limit",
                "1000000000000000",
                '"50MB"',
            ),
        ):
            self.proxy.stall()
            self.writer.add(TO_BE_CUT)
            self.server.evaluate(f"{set_limit}({alarm}).")
            self.proxy.resume()
            try:
                refused = f"is not accepting messages: low on {what}"
                relay.wait_for_log(refused, times=2)
                left = self.inspection.unsettled()
                assert left
                assert self.inspection.charged() == 0
            finally:
                self.server.evaluate(f"{set_limit}({calm}).")
            self.wait_for_progress(left)
        self.proxy.stall()
        self.writer.add(TO_BE_CUT)
        self.expect_all(relay, self.proxy.resume)


@pytest.mark.variant
class TestRabbitMQWithAClassicQueue(RabbitMQFaults):
    kind: ClassVar[str] = "classic"
