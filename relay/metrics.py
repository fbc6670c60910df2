"""The metrics of a relay, for Prometheus; needs the extra `metrics`."""

import collections
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from outbox.events import Event, ProcessMeasured
from outbox.observability.latency import LONG, SHORT
from outbox.observability.prometheus import LatencyHistogram, TopicLabels
from relay.activity import RelayCounts
from relay.events import (
    BatchClaimed,
    BatchPublished,
    BatchSettled,
    BrokerLost,
    BrokerRecovered,
    MessageDeadLettered,
    MessageRefused,
    RelayStopped,
)


class RelayMetrics:
    """An observer that keeps the metrics of one relay.

    Args:
        counts: an observer of the same relay; its latencies are exported.
    """

    def __init__(
        self, registry: CollectorRegistry, topics: TopicLabels, counts: RelayCounts
    ) -> None:
        self._topics = topics
        self._by_topic = [
            Counter(
                f"pillarbox_relay_messages_{name}",
                documentation,
                ["topic"],
                registry=registry,
            )
            for name, documentation in (
                ("published", "Messages that the broker accepted."),
                ("refused", "Refusals by the broker after which a message is retried."),
                ("dead_lettered", "Messages that became dead letters of the outbox."),
            )
        ]
        LatencyHistogram(
            "pillarbox_relay_add_to_publish_seconds",
            "Time from adding a message, or the moment it was scheduled for, until the"
            " broker accepted it.",
            [],
            LONG,
            registry,
        ).share(counts.latencies)
        self._claims, self._publishes, self._settlements = (
            LatencyHistogram(
                f"pillarbox_relay_{name}_duration_seconds",
                documentation,
                [],
                SHORT,
                registry,
            )
            for name, documentation in (
                ("claim", "Time to read a batch of messages from the database."),
                ("publish", "Time until the broker answered for a batch."),
                ("settle", "Time to record the outcomes of a batch."),
            )
        )
        self._lanes = Gauge(
            "pillarbox_relay_lanes",
            "Lanes that this relay holds, of 48 in all replicas.",
            registry=registry,
        )
        self._blocked_keys = Gauge(
            "pillarbox_relay_blocked_keys",
            "Keys whose first message waits for its retry.",
            registry=registry,
        )
        self._breaker_open = Gauge(
            "pillarbox_relay_breaker_open",
            "1 while the broker is unavailable and nothing is claimed.",
            registry=registry,
        )
        self._counters: dict[str, list[Counter]] = {}
        self._learn: dict[type[Event], Callable[[Any], None]] = {
            BatchClaimed: lambda event: self._claims.of().add(event.seconds),
            BatchPublished: self._record_published,
            BatchSettled: lambda event: self._settlements.of().add(event.seconds),
            MessageRefused: self._record_refused,
            MessageDeadLettered: self._record_dead_lettered,
            BrokerLost: lambda _: self._breaker_open.set(1),
            BrokerRecovered: lambda _: self._breaker_open.set(0),
            ProcessMeasured: self._record_measured,
            RelayStopped: lambda _: self._lanes.set(0),
        }

    def __call__(self, event: Event) -> None:
        """Update the metrics from an event."""
        learn = self._learn.get(type(event))
        if learn is not None:
            learn(event)

    def _record_published(self, event: BatchPublished) -> None:
        self._publishes.of().add(event.seconds)
        for topic, count in collections.Counter(event.topics).items():
            published, _, _ = self._of(topic)
            published.inc(count)

    def _record_refused(self, event: MessageRefused) -> None:
        _, refused, _ = self._of(event.topic)
        refused.inc()

    def _record_dead_lettered(self, event: MessageDeadLettered) -> None:
        _, _, dead_lettered = self._of(event.topic)
        dead_lettered.inc()

    def _of(self, topic: str) -> list[Counter]:
        label = self._topics.of(topic)
        counters = self._counters.get(label)
        if counters is None:
            # All start at 0: Prometheus sees no increase in a series that is new.
            counters = [it.labels(label) for it in self._by_topic]
            self._counters[label] = counters
        return counters

    def _record_measured(self, event: ProcessMeasured) -> None:
        self._lanes.set(event.held)
        self._blocked_keys.set(event.blocked_keys)
