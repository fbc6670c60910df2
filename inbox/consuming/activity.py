"""What a consumer did since its last report; see `ConsumerActive`."""

import time
from datetime import timedelta

from inbox.events import (
    ConsumerActive,
    DuplicateSkipped,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from outbox.events import Event, ProcessMeasured
from outbox.message_id import seconds_since_epoch
from outbox.observability.latency import Latencies


class ConsumerCounts:
    """An observer that counts what a consumer does.

    Attributes:
        consumer: the consumer's name.
        latencies: the times from add to handled, of all messages so far.
    """

    def __init__(self, consumer: str) -> None:
        self.consumer = consumer
        self.latencies = Latencies()
        self._in_flight = self._held = 0
        self._begin()

    def _begin(self) -> None:
        self._handled = self._failed = self._duplicates = 0
        self._retried = self._dead_lettered = 0

    def __call__(self, event: Event) -> None:
        """Count an event."""
        if type(event) is MessageHandled:
            self._handled += 1
            added = seconds_since_epoch(event.id)
            if added is not None:
                self.latencies.add(time.time() - added)
            return
        match event:
            case DuplicateSkipped():
                self._duplicates += 1
            case HandlerFailed():
                self._failed += 1
                self._retried += 1
            case RetryRequested():
                self._retried += 1
            case MessageDeadLettered():
                self._dead_lettered += 1
            case ProcessMeasured():
                self._in_flight, self._held = event.in_flight, event.held

    @property
    def is_active(self) -> bool:
        """Whether anything has happened since the last `take`."""
        return bool(
            self._handled
            or self._failed
            or self._duplicates
            or self._retried
            or self._dead_lettered
        )

    def take(self, period: timedelta) -> ConsumerActive:
        """Return the activity since the last `take`, and reset the counts."""
        latencies = self.latencies.take()
        active = ConsumerActive(
            consumer=self.consumer,
            handled=self._handled,
            failed=self._failed,
            duplicates=self._duplicates,
            retried=self._retried,
            dead_lettered=self._dead_lettered,
            lag=latencies.quantile(0.5),
            slowest=latencies.longest if latencies.count else None,
            in_flight=self._in_flight,
            held=self._held,
            period=period,
        )
        self._begin()
        return active
