"""A librdkafka producer, and the thread that polls for its delivery reports.

A producer keeps the order of each Kafka partition through all errors: it retries on its
own, and once the broker refuses a record, it accepts no more (librdkafka's fatal error
"gapless guarantee"). So a producer is dead after any failure, and its successor
continues with the records that were not reported.
"""

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from pillarbox.outbox.brokers.kafka.connection import kafka_unavailable, reason_of
from pillarbox.outbox.brokers.kafka.message import NewRecord
from pillarbox.outbox.errors import BrokerUnavailableError

UNREPORTED: Final = KafkaError(KafkaError._PURGE_INFLIGHT)
"""The error of a record whose report never arrived; it may have been stored."""

_POLL: Final = 0.1
_SLICE: Final = 1.0
_PATIENCE: Final = 2.0
_FULL_PAUSE: Final = 0.005
_LAST_POLLS: Final = 20
_MAX_LEFT: Final = 5000
_LAST_WAIT: Final = 10.0


class _Reports:
    """The delivery reports for one call, collected by the thread."""

    def __init__(self, count: int, loop: asyncio.AbstractEventLoop) -> None:
        self.errors: list[KafkaError | None] = [UNREPORTED] * count
        self.moved = asyncio.Event()
        self.reported = 0
        self.reported_when_down = 0
        self.started_at = loop.time()
        self._loop = loop
        self._expected: int | None = None

    @property
    def complete(self) -> bool:
        return self.reported == self._expected

    def expect(self, count: int) -> None:
        self._expected = count

    def on_delivery(self, index: int, error: KafkaError | None, _: object) -> None:
        self.errors[index] = error
        self.reported += 1
        if self.complete:
            # If the loop is closed, nobody waits for the reports.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.moved.set)


class Producer:
    """A producer for one event loop.

    Args:
        config: librdkafka's configuration, without callbacks.
        name: the broker's name in error messages.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.dead = False
        self.refusal: str | None = None
        """Why the broker rejected the credentials, if it did."""
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._client: confluent_kafka.Producer | None = confluent_kafka.Producer(
            {**config, "error_cb": self._on_error}
        )
        self._reason = "no broker answered"
        self._down_at: float | None = None
        self._open: set[_Reports] = set()
        self._stop = threading.Event()
        self.ended = asyncio.Event()
        """Set once the thread has ended and the connections are closed."""
        threading.Thread(
            target=self._run, args=(self._client,), name="kafka", daemon=True
        ).start()

    async def send(
        self, records: Sequence[NewRecord], until: float
    ) -> Sequence[KafkaError | None]:
        """Send records in this order; return an error or None for each.

        Those not reported by `until`, a time on the loop's clock, are `UNREPORTED`, and
        the producer is then dead.

        Raises:
            BrokerUnavailableError: all brokers are unreachable; the producer is dead.
        """
        reports = _Reports(len(records), self._loop)
        self._open.add(reports)
        try:
            reports.expect(await self._produce(records, reports, until))
            while not (reports.complete or self.ended.is_set()):
                if self._loop.time() >= until:
                    self.abandon()
                    break
                await self._wait(reports, until)
        except asyncio.CancelledError:
            # Abandoned records must not pile up while a broker hangs, but a new
            # producer takes up to a second to start, which can be too long.
            if self._client is not None and len(self._client) > _MAX_LEFT:
                self.abandon()
            raise
        finally:
            self._open.discard(reports)
        # By identity, since comparing an error with None by == breaks the interpreter.
        if any(error is None for error in reports.errors):
            self._down_at = None
        return reports.errors

    async def topics(self, until: float, topic: str | None = None) -> Mapping[str, Any]:
        """Return the metadata of all topics, or of one of them.

        Raises:
            BrokerUnavailableError: no broker answers; the producer is then dead.
        """
        named = {} if topic is None else {"topic": topic}
        while (client := self._client) is not None:
            try:
                # A short timeout, because a thread can't be cancelled.
                found = await asyncio.to_thread(
                    client.list_topics, timeout=_SLICE, **named
                )
            except KafkaException as error:
                if self._down_at is None and self.refusal is None:
                    self._reason = reason_of(error)
                    if self._loop.time() < until:
                        continue
                break
            else:
                return dict(found.topics)
        raise self.abandon()

    def abandon(self, reason: str | None = None) -> BrokerUnavailableError:
        """Drop unreported records for good, and return the error to raise."""
        self.dead = True
        self._stop.set()
        return kafka_unavailable(self._name, reason or self._reason)

    async def close(self) -> None:
        """Drop unreported records, and disconnect."""
        self.abandon()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WAIT):
                await self.ended.wait()

    async def _produce(
        self, records: Sequence[NewRecord], reports: _Reports, until: float
    ) -> int:
        """Queue records up to the first that librdkafka refuses; return how many."""
        for index, (topic, key, value, headers) in enumerate(records):
            on_delivery = partial(reports.on_delivery, index)
            while True:
                client = self._client
                if self.dead or client is None:
                    return index
                try:
                    client.produce(
                        topic,
                        value,
                        key,
                        on_delivery=on_delivery,
                        headers=headers,  # type: ignore[arg-type] # dict is invariant
                    )
                except BufferError:
                    if self._loop.time() >= until:
                        raise self.abandon("its queue is still full") from None
                    await asyncio.sleep(_FULL_PAUSE)
                except KafkaException as error:
                    if error.args[0].code() != KafkaError._FATAL:
                        reports.errors[index] = error.args[0]
                    return index
                else:
                    break
        return len(records)

    async def _wait(self, reports: _Reports, until: float) -> None:
        limit = until
        # Once a report has arrived, a broker is available again.
        if self._down_at is not None and reports.reported == reports.reported_when_down:
            since = max(self._down_at, reports.started_at)
            limit = min(until, since + _PATIENCE)
            if self._loop.time() >= limit:
                raise self.abandon()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(limit):
                await reports.moved.wait()
        reports.moved.clear()

    def _run(self, client: confluent_kafka.Producer) -> None:
        with suppress(KafkaException):  # a fatal error
            while not self._stop.is_set():
                client.poll(_POLL)
        # Reports on refused records arrive after the fatal error. If they were purged
        # first, a refused record would look like its neighbours.
        until = time.monotonic() + _PATIENCE
        while len(client) and not self._stop.is_set() and time.monotonic() < until:
            with suppress(KafkaException):
                client.poll(_POLL)
        client.purge()
        for _ in range(_LAST_POLLS):
            with suppress(KafkaException):
                client.poll(0)
            if not len(client):
                break
        self._client = None
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self.dead = True
        self.ended.set()
        self._wake()

    def _wake(self) -> None:
        for reports in self._open:
            reports.moved.set()

    def _on_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._go_down)
            return
        self._reason = reason_of(error)
        if error.code() == KafkaError._AUTHENTICATION:
            self.refusal = self._reason

    def _go_down(self) -> None:
        if self._down_at is not None:
            return  # librdkafka repeats the error at every attempt
        self._down_at = self._loop.time()
        for reports in self._open:
            reports.reported_when_down = reports.reported
        self._wake()
