"""The counts of a relay since its last report; see `RelayActive`."""

from collections import Counter
from datetime import timedelta

from pillarbox.outbox.events import Event, ProcessMeasured
from pillarbox.outbox.observability.counters import TopicCounters
from pillarbox.outbox.observability.latency import Latencies
from pillarbox.relay.events import (
    BatchPublished,
    LeaseLost,
    LeaseTaken,
    MessageDeadLettered,
    MessageRefused,
    RelayActive,
)


def count_topics(counters: TopicCounters, event: Event) -> None:
    """Count what an event means for the charts of the page."""
    match event:
        case BatchPublished():
            for topic, count in Counter(event.topics).items():
                counters.done(topic, count)
        case MessageRefused() | MessageDeadLettered():
            counters.failed(event.topic)


class RelayCounts:
    """An observer that counts what a relay does.

    Attributes:
        latencies: the times from add to publish, of all messages so far.
    """

    def __init__(self) -> None:
        self._lanes: set[int] = set()
        self._blocked_keys = 0
        self.latencies = Latencies()
        self._begin()

    def _begin(self) -> None:
        self._published = self._refused = self._dead_lettered = 0

    def __call__(self, event: Event) -> None:
        """Update the counts from an event."""
        match event:
            case BatchPublished():
                self._published += event.acked
                self.latencies.add_since(event.due_at)
            case MessageRefused():
                self._refused += 1
            case MessageDeadLettered():
                self._dead_lettered += 1
            case ProcessMeasured():
                self._blocked_keys = event.blocked_keys
            case LeaseTaken():
                self._lanes.update(event.lanes)
            case LeaseLost():
                self._lanes.difference_update(event.lanes)

    @property
    def is_active(self) -> bool:
        """Whether anything happened since the last `take`."""
        return bool(self._published or self._refused or self._dead_lettered)

    def take(self, period: timedelta) -> RelayActive:
        """Return what happened since the last `take`, and start over."""
        latencies = self.latencies.take()
        active = RelayActive(
            published=self._published,
            refused=self._refused,
            dead_lettered=self._dead_lettered,
            lag=latencies.quantile(0.5),
            slowest=latencies.longest if self._published else None,
            lanes=len(self._lanes),
            blocked_keys=self._blocked_keys,
            period=period,
        )
        self._begin()
        return active
