"""The fault suite with a scripted SQS, which also throttles and rejects."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from itertools import cycle

import pytest
from typing_extensions import override

from pillarbox.outbox.brokers.sqs.message import read
from tests.acceptance.broker_faults import TO_BE_CUT, TOPIC, Arrival, BrokerFaults
from tests.fixtures.proxy import Proxy
from tests.fixtures.sqs_script import (
    Answer,
    Entry,
    ScriptedSqs,
    error,
    fault,
    taken,
)

pytestmark = pytest.mark.fault


class Service:
    """Runs the script in its own thread, and records the accepted requests."""

    def __init__(self) -> None:
        self.sqs = ScriptedSqs(self.take)
        self.arrivals: list[Arrival] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: asyncio.Server | None = None

    def start(self) -> None:
        """Accept connections, always at the same port."""
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(60)

    def stop(self) -> None:
        """Break all connections, and accept no new ones."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(60)

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def take(self, entries: Sequence[Entry]) -> Answer:
        """Accept all entries; the default script."""
        for entry in entries:
            message, problem = read(
                entry["MessageBody"], entry["MessageAttributes"], place=TOPIC
            )
            assert problem is None, problem
            number = int(message.payload)
            self.arrivals.append((str(message.id), message.key or "", number))
        return taken(entries)

    def reject(self) -> None:
        """Answer with each temporary error in turn that isn't the message's fault."""
        refusals = cycle(
            [
                error("RequestThrottled", 403),
                error("InternalFailure", 500),
                error("ServiceUnavailable", 503),
                None,
            ]
        )

        def script(entries: Sequence[Entry]) -> Answer:
            throttled = fault("ThrottlingException", sender=True)
            return next(refusals) or taken(
                entries, {entry["MessageBody"]: throttled for entry in entries}
            )

        self.sqs.script = script

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self.sqs.serve, "127.0.0.1", self.sqs.port
        )
        self.sqs.port = self._server.sockets[0].getsockname()[1]

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        serving = asyncio.all_tasks() - {asyncio.current_task()}
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


class TestScriptedSqs(BrokerFaults):
    @pytest.fixture(autouse=True)
    def broker(self, parts: None) -> Iterator[None]:
        make_proxy = self.make_proxy

        def make_endpoint(url: str) -> tuple[Proxy, str]:
            endpoint = f"http://127.0.0.1:{self.service.sqs.port}"
            proxy, through = make_proxy(endpoint)
            return proxy, url.replace(endpoint, through)

        self.make_proxy = make_endpoint
        self.service = Service()
        self.service.start()
        yield
        self.service.close()

    @override
    def broker_url(self) -> str:
        return self.service.sqs.url("&fifo=true")

    @override
    def arrivals(self) -> Sequence[Arrival]:
        return self.service.arrivals

    @override
    def kill(self) -> None:
        self.service.stop()

    @override
    def start(self) -> None:
        self.service.start()

    @pytest.mark.timeout(900)
    def test_a_service_that_rejects_everything_costs_no_attempt(self) -> None:
        relay = self.drain()
        self.service.reject()
        self.writer.add(TO_BE_CUT)
        relay.wait_for_log("BrokerLost", times=5)
        assert self.inspection.unsettled()
        assert self.inspection.charged() == 0
        self.service.sqs.script = self.service.take
        self.expect_all(relay)
