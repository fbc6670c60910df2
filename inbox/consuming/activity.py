"""A consumer's activity since its last report; see `ConsumerActive`."""

import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Final

from pillarbox.inbox.events import (
    ConsumerActive,
    DuplicateSkipped,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from pillarbox.outbox.events import Event, ProcessMeasured
from pillarbox.outbox.observability.counters import TopicCounters
from pillarbox.outbox.observability.latency import Latencies

COUNTED: Final[Mapping[type[Event], tuple[str, ...]]] = {
    MessageHandled: ("handled",),
    DuplicateSkipped: ("duplicate",),
    HandlerFailed: ("failed", "retried"),
    RetryRequested: ("retried",),
    MessageDeadLettered: ("dead_lettered",),
}
"""The counters that an event increments; metrics have the same names."""


def count_topics(counters: TopicCounters, event: Event) -> None:
    """Count what an event means for the charts of the page."""
    match event:
        case MessageHandled():
            counters.done(event.topic)
            if event.due_at is not None:
                counters.took(event.topic, time.time() - event.due_at)
        case HandlerFailed() | MessageDeadLettered():
            counters.failed(event.topic)


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
        self._counts: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        """Count an event."""
        for name in COUNTED.get(type(event), ()):
            self._counts[name] += 1
        if isinstance(event, MessageHandled):
            if event.due_at is not None:
                self.latencies.add(time.time() - event.due_at)
        elif isinstance(event, ProcessMeasured):
            self._in_flight, self._held = event.in_flight, event.held

    @property
    def is_active(self) -> bool:
        """Whether anything has happened since the last `take`."""
        return bool(self._counts)

    def take(self, period: timedelta) -> ConsumerActive:
        """Return the activity since the last `take`, and reset the counts."""
        latencies = self.latencies.take()
        counts, self._counts = self._counts, Counter()
        return ConsumerActive(
            consumer=self.consumer,
            handled=counts["handled"],
            failed=counts["failed"],
            duplicates=counts["duplicate"],
            retried=counts["retried"],
            dead_lettered=counts["dead_lettered"],
            lag=latencies.quantile(0.5),
            slowest=latencies.longest if latencies.count else None,
            in_flight=self._in_flight,
            held=self._held,
            period=period,
        )
