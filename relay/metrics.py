"""The metrics of a relay, for Prometheus; needs the extra `metrics`."""

import collections
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from pillarbox.outbox.events import Event, ProcessMeasured
from pillarbox.outbox.observability.latency import LONG, SHORT
from pillarbox.outbox.observability.prometheus import LatencyHistogram, TopicLabels
from pillarbox.relay.activity import RelayCounts
from pillarbox.relay.events import (
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
        gauge = partial(Gauge, registry=registry)
        histogram = partial(LatencyHistogram, labels=[], registry=registry)
        self._topics = topics
        self._by_topic = {
            name: Counter(
                f"pillarbox_relay_messages_{name}",
                documentation,
                ["topic"],
                registry=registry,
            )
            for name, documentation in (
                ("published", "Messages that the broker accepted."),
                ("refused", "Messages refused by the broker that will be retried."),
                ("dead_lettered", "Messages that became dead letters of the outbox."),
            )
        }
        histogram(
            "pillarbox_relay_add_to_publish_seconds",
            "Time from adding a message, or the moment it was scheduled for, until the"
            " broker accepted it.",
            bounds=LONG,
        ).share(counts.latencies)
        self._claims, self._publishes, self._settlements = (
            histogram(
                f"pillarbox_relay_{name}_duration_seconds", documentation, bounds=SHORT
            )
            for name, documentation in (
                ("claim", "Time to read a batch of messages from the database."),
                ("publish", "Time until the broker answered for a batch."),
                ("settle", "Time to record the outcomes of a batch."),
            )
        )
        self._lanes = gauge(
            "pillarbox_relay_lanes", "Lanes held by this relay, of 48 in total."
        )
        self._blocked_keys = gauge(
            "pillarbox_relay_blocked_keys",
            "Blocked keys: the first message is waiting for a retry.",
        )
        self._breaker_open = gauge(
            "pillarbox_relay_breaker_open",
            "1 while the broker is unavailable and nothing is claimed.",
        )
        self._counters: dict[str, dict[str, Counter]] = {}

    def __call__(self, event: Event) -> None:
        """Update the metrics from an event."""
        match event:
            case BatchClaimed():
                self._claims.of().add(event.seconds)
            case BatchPublished():
                self._publishes.of().add(event.seconds)
                for topic, count in collections.Counter(event.topics).items():
                    self._of("published", topic).inc(count)
            case BatchSettled():
                self._settlements.of().add(event.seconds)
            case MessageRefused():
                self._of("refused", event.topic).inc()
            case MessageDeadLettered():
                self._of("dead_lettered", event.topic).inc()
            case BrokerLost():
                self._breaker_open.set(1)
            case BrokerRecovered():
                self._breaker_open.set(0)
            case ProcessMeasured():
                self._lanes.set(event.held)
                self._blocked_keys.set(event.blocked_keys)
            case RelayStopped():
                self._lanes.set(0)

    def _of(self, name: str, topic: str) -> Counter:
        label = self._topics.of(topic)
        counters = self._counters.get(label)
        if counters is None:
            # All start at 0: Prometheus sees no increase in a series that is new.
            counters = {n: it.labels(label) for n, it in self._by_topic.items()}
            self._counters[label] = counters
        return counters[name]
