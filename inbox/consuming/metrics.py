"""Prometheus metrics of a consumer; requires the extra `metrics`."""

import time
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge

from pillarbox.inbox.consuming.activity import COUNTED, ConsumerCounts
from pillarbox.inbox.events import (
    ConsumerStarted,
    ConsumerStopped,
    DeliveryEvent,
    MessageHandled,
)
from pillarbox.outbox.events import Event, ProcessMeasured
from pillarbox.outbox.observability.latency import LONG, Latencies
from pillarbox.outbox.observability.prometheus import (
    OTHER,
    LatencyHistogram,
    TopicLabels,
)


class _OfTopic(NamedTuple):
    """The counters, by name, and the histogram of one topic."""

    handler_duration: Latencies
    counters: dict[str, Counter]


class ConsumerMetrics:
    """An observer that maintains the metrics of a consumer.

    Args:
        counts: an observer of the same consumer, whose latencies are exported.
    """

    def __init__(
        self, registry: CollectorRegistry, topics: TopicLabels, counts: ConsumerCounts
    ) -> None:
        gauge = partial(Gauge, labelnames=["consumer"], registry=registry)
        histogram = partial(
            LatencyHistogram, labels=["consumer"], bounds=LONG, registry=registry
        )
        self._topics = topics
        self._by_topic = {
            name: Counter(
                f"pillarbox_consumer_messages_{name}",
                documentation,
                ["consumer", "topic"],
                registry=registry,
            )
            for name, documentation in (
                ("handled", "Messages whose effects and receipt are committed."),
                ("failed", "Handler calls that raised and will be retried."),
                ("duplicate", "Duplicates that were skipped."),
                ("retried", "Retries, after a failure or at the handler's request."),
                ("dead_lettered", "Messages that became dead letters of the inbox."),
            )
        }
        self._handler_duration = histogram(
            "pillarbox_consumer_handler_duration_seconds",
            "Time to handle a message and to commit.",
            labels=["consumer", "topic"],
        )
        self._publish_to_handle = histogram(
            "pillarbox_consumer_publish_to_handle_seconds",
            "Time from publishing a message until its handler was called, if the"
            " broker records that time.",
        )
        histogram(
            "pillarbox_consumer_add_to_handled_seconds",
            "Time from adding a message until it was handled; without a broker, from"
            " the moment it was scheduled for.",
        ).share(counts.latencies, counts.consumer)
        self._in_flight = gauge(
            "pillarbox_consumer_in_flight_messages", "Running handlers."
        )
        self._held = gauge(
            "pillarbox_consumer_held_messages", "Messages fetched and not yet settled."
        )
        self._paused = gauge(
            "pillarbox_consumer_paused",
            "1 while the consumer or a topic of it is paused, else 0.",
        )
        self._blocked = gauge(
            "pillarbox_consumer_blocked_keys",
            "Blocked keys: the first message is waiting for a retry in this process.",
        )
        self._blocked_age = gauge(
            "pillarbox_consumer_blocked_key_age_seconds",
            "Longest time that a key has been blocked.",
        )
        self._handler_age = gauge(
            "pillarbox_consumer_longest_handler_seconds",
            "Run time of the most overdue handler, or else of the longest-running"
            " one, if more than a few seconds.",
            labelnames=["consumer", "handler", "overdue"],
        )
        self._known: dict[tuple[str, str], _OfTopic] = {}
        # Cached by topic, which is faster than finding the label. Topics that share a
        # label are left out.
        self._by_name: dict[tuple[str, str], _OfTopic] = {}

    def __call__(self, event: Event) -> None:
        """Record an event in the metrics."""
        if (names := COUNTED.get(type(event))) is not None:
            assert isinstance(event, DeliveryEvent)
            known = self._of(event.consumer, event.topic)
            for name in names:
                known.counters[name].inc()
            if isinstance(event, MessageHandled):
                self._record_times(event, known)
            return
        match event:
            case ConsumerStarted():
                for topic in event.topics:
                    if not topic.endswith("*"):
                        self._of(event.consumer, topic)
            case ProcessMeasured():
                self._record_measured(event)
            case ConsumerStopped():
                self._in_flight.labels(event.consumer).set(0)
                self._held.labels(event.consumer).set(0)

    def _of(self, consumer: str, topic: str) -> _OfTopic:
        known = self._by_name.get((consumer, topic))
        if known is not None:
            return known
        label = self._topics.of(topic)
        labels = consumer, label
        known = self._known.get(labels)
        if known is None:
            # All start at 0: Prometheus sees no increase in a series that is new.
            known = self._known[labels] = _OfTopic(
                self._handler_duration.of(*labels),
                {name: it.labels(*labels) for name, it in self._by_topic.items()},
            )
        if label != OTHER:
            self._by_name[consumer, topic] = known
        return known

    def _record_times(self, event: MessageHandled, known: _OfTopic) -> None:
        known.handler_duration.add(event.seconds)
        if event.published_at is not None:
            waited = time.time() - event.seconds - event.published_at
            self._publish_to_handle.of(event.consumer).add(waited)

    def _record_measured(self, event: ProcessMeasured) -> None:
        self._in_flight.labels(event.name).set(event.in_flight)
        self._held.labels(event.name).set(event.held)
        self._paused.labels(event.name).set(bool(event.paused))
        self._blocked.labels(event.name).set(event.blocked_keys)
        self._blocked_age.clear()
        if event.blocked_for is not None:
            age = event.blocked_for.total_seconds()
            self._blocked_age.labels(event.name).set(age)
        self._handler_age.clear()
        if event.running_since is not None:
            age = (datetime.now(UTC) - event.running_since).total_seconds()
            overdue = str(event.is_overdue).lower()
            self._handler_age.labels(event.name, event.running_handler, overdue).set(
                age
            )
