"""The fault suite with NATS JetStream."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from typing_extensions import override

from tests.acceptance.broker_faults import Arrival, BrokerFaults
from tests.fixtures.nats import ask, stored
from tests.servers.nats import nats_server

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

    @pytest.mark.timeout(900)
    def test_a_full_stream_costs_no_attempt(self) -> None:
        stream = {"name": "NUMBERS", "subjects": ["numbers.>"], "discard": "new"}
        self.ask("STREAM.CREATE", **stream, max_msgs=self.count // 2)
        relay = self.drain()
        relay.wait_for_log("BrokerLost", times=3)
        assert "maximum messages exceeded" in relay.log()
        assert self.inspection.unsettled()
        assert self.inspection.charged() == 0
        self.ask("STREAM.UPDATE", **stream)
        self.expect_all(relay)

    def ask(self, what: str, **settings: Any) -> None:
        asyncio.run(ask(self.server.url, f"{what}.NUMBERS", **settings))

    @pytest.mark.timeout(900)
    def test_full_storage_costs_no_attempt(self) -> None:
        self.server.stop()
        self.server.configure({"jetstream": {"max_file_store": self.count * 100}})
        self.server.start()
        relay = self.drain()
        relay.wait_for_log("BrokerLost", times=3)
        assert "is not accepting messages" in relay.log()
        assert self.inspection.unsettled()
        assert self.inspection.charged() == 0
        self.server.stop()
        self.server.configure({})
        self.server.start()
        self.expect_all(relay)
