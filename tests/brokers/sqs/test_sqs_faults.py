"""The fault suite with SQS, as far as moto's server can fail.

The server gets slower with the square of a queue's length, and loses all messages when
it is killed. A reader therefore empties the queue continuously, and before each kill.
"""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import ClassVar

import pytest
from typing_extensions import override

from pillarbox.outbox.brokers.sqs.connection import resource_name
from tests.acceptance.broker_faults import TOPIC, Arrival, BrokerFaults
from tests.fixtures.proxy import Proxy
from tests.fixtures.sqs import Aws, account
from tests.servers.sqs import sqs_server

pytestmark = [pytest.mark.fault, pytest.mark.variant]


class Reader:
    """Removes messages from a queue, in a loop in its own thread."""

    def __init__(self, aws: Aws, queue: str, *, subscribed: bool) -> None:
        self.arrivals: list[Arrival] = []
        self._aws = aws
        self._queue = queue
        self._subscribed = subscribed
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._reading: Future[None] | None = None
        self._enough = threading.Event()

    def start(self) -> None:
        """Create the queue, and the topic it subscribes to, if any; start reading."""
        self._enough.clear()
        asyncio.run_coroutine_threadsafe(self._make(), self._loop).result(timeout=30)
        self._reading = asyncio.run_coroutine_threadsafe(self._read(), self._loop)

    def finish(self) -> None:
        """Read the remaining messages, and stop."""
        self._enough.set()
        if self._reading is not None:
            self._reading.result(timeout=600)
            self._reading = None

    def close(self) -> None:
        self.finish()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _make(self) -> None:
        if self._subscribed:
            await self._aws.subscribe(self._queue, self._queue)
        else:
            await self._aws.create_queue(self._queue)

    async def _read(self) -> None:
        async for messages in self._aws.drain(self._queue, until=self._enough.is_set):
            self.arrivals += [
                (str(m.id), m.key or "", int(m.payload)) for m in messages
            ]


class TestSqs(BrokerFaults):
    publish_timeout = 8.0
    scheme: ClassVar[str] = "sqs"
    fifo: ClassVar[bool] = True

    @pytest.fixture(autouse=True)
    def broker(self, parts: None) -> Iterator[None]:
        make_proxy = self.make_proxy

        def make_endpoint(url: str) -> tuple[Proxy, str]:
            self.proxy, through = make_proxy(self.server.endpoint_url)
            return self.proxy, url.replace(self.server.endpoint_url, through)

        self.make_proxy = make_endpoint
        self.count = min(self.count, 5_000)  # moto's server is slow
        with sqs_server() as self.server, account(self.server) as aws:
            self.reader = Reader(
                aws,
                resource_name(TOPIC, fifo=self.fifo),
                subscribed=self.scheme == "sns",
            )
            self.reader.start()
            yield
            self.reader.close()

    @override
    def broker_url(self) -> str:
        return f"{self.server.url(self.scheme)}&fifo={str(self.fifo).lower()}"

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
        # The relay must not find the server without its queue.
        self.proxy.stall()
        self.server.start()
        self.reader.start()
        self.proxy.resume()


class TestStandardSqs(TestSqs):
    ordered = False
    fifo = False


class TestSns(TestSqs):
    scheme = "sns"
