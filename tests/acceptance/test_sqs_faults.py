"""SQS in trouble, by the suite of faults, as far as moto's server can be.

It gets slower with the square of what is in a queue, and forgets all of it when it is
killed. So a reader empties the queue all the time, and before a kill.
"""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest
from typing_extensions import override

from outbox.sqs import resource_name
from outbox.testing.sqs import SqsServer, sqs_server
from tests.acceptance.broker_faults import TOPIC, Arrival, BrokerFaults
from tests.fixtures.proxy import Proxy
from tests.fixtures.sqs import Aws

pytestmark = pytest.mark.fault

QUEUE = resource_name(TOPIC, fifo=True)


class Reader:
    """Takes out what comes into the queue, by a loop in a thread of its own."""

    def __init__(self, server: SqsServer) -> None:
        self.arrivals: list[Arrival] = []
        self._aws = Aws(server)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._reading: Future[None] | None = None
        self._enough = threading.Event()

    def start(self) -> None:
        """Make the queue, and begin."""
        self._enough.clear()
        made = self._aws.create_queue(QUEUE)
        asyncio.run_coroutine_threadsafe(made, self._loop).result(timeout=30)
        self._reading = asyncio.run_coroutine_threadsafe(self._read(), self._loop)

    def finish(self) -> None:
        """Take out what is left, and end."""
        self._enough.set()
        if self._reading is not None:
            self._reading.result(timeout=120)
            self._reading = None

    def close(self) -> None:
        self.finish()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _read(self) -> None:
        async for messages in self._aws.drain(QUEUE, until=self._enough.is_set):
            self.arrivals += [
                (str(m.id), m.key or "", int(m.payload)) for m in messages
            ]


class TestSqs(BrokerFaults):
    publish_timeout = 8.0

    @pytest.fixture(autouse=True)
    def broker(self, parts: None) -> Iterator[None]:
        make_proxy = self.make_proxy

        def make_endpoint(url: str) -> tuple[Proxy, str]:
            self.proxy, through = make_proxy(self.server.endpoint_url)
            return self.proxy, url.replace(self.server.endpoint_url, through)

        self.make_proxy = make_endpoint
        with sqs_server() as self.server:
            self.reader = Reader(self.server)
            self.reader.start()
            yield
            self.reader.close()

    @override
    def broker_url(self) -> str:
        return f"{self.server.url()}&fifo=true"

    @override
    def arrivals(self) -> Sequence[Arrival]:
        self.reader.finish()
        return self.reader.arrivals

    @override
    def kill(self) -> None:
        self.proxy.stall()
        self.reader.finish()
        self.server.kill()
        self.proxy.resume()

    @override
    def start(self) -> None:
        # Nobody is to find it without its queue.
        self.proxy.stall()
        self.server.start()
        self.reader.start()
        self.proxy.resume()
