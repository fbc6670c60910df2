"""NATS JetStream as a broker in trouble, by the suite of faults."""

import asyncio
from collections.abc import Iterator, Sequence

import pytest
from typing_extensions import override

from outbox.testing.nats import nats_server
from tests.acceptance.broker_faults import Arrival, BrokerFaults
from tests.fixtures.nats import stored

pytestmark = pytest.mark.fault


class TestNats(BrokerFaults):
    @pytest.fixture(autouse=True)
    def broker(self) -> Iterator[None]:
        with nats_server() as self.server:
            yield

    @override
    def broker_url(self) -> str:
        return f"{self.server.url}?stream=NUMBERS&create=numbers.>"

    @override
    def arrivals(self) -> Sequence[Arrival]:
        messages = asyncio.run(stored(self.server.url, "NUMBERS"))
        return [(str(m.id), m.key or "", int(m.payload)) for m in messages]

    @override
    def kill(self) -> None:
        self.server.kill()

    @override
    def start(self) -> None:
        self.server.start()

    @pytest.mark.timeout(300)
    def test_full_storage_is_not_the_messages_fault(self) -> None:
        self.server.stop()
        self.server.configure({"jetstream": {"max_file_store": self.count * 100}})
        self.server.start()
        relay = self.drain()
        relay.wait_for_log("BrokerLost", times=3)
        assert "takes nothing now" in relay.log()
        assert self.inspection.unsettled()
        assert self.inspection.charged() == 0
        self.server.stop()
        self.server.configure({})
        self.server.start()
        self.expect_all(relay)
