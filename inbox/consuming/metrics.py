"""The metrics of a consumer, for Prometheus; needs the extra `metrics`."""

import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from inbox.events import (
    ConsumerMeasured,
    ConsumerStarted,
    ConsumerStopped,
    DeliveryEvent,
    DuplicateSkipped,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from outbox.events import BlockedKeysMeasured, Event
from outbox.message_id import seconds_since_epoch
from outbox.observability.latency import LONG
from outbox.observability.prometheus import LatencyHistogram, TopicLabels


class ConsumerMetrics:
    """An observer that keeps the metrics of the consumers of a process."""

    def __init__(self, registry: CollectorRegistry, topics: TopicLabels) -> None:
        self._topics = topics
        (
            self._handled,
            self._failed,
            self._duplicate,
            self._retried,
            self._dead_lettered,
        ) = (
            Counter(
                f"pillarbox_consumer_messages_{name}",
                documentation,
                ["consumer", "topic"],
                registry=registry,
            )
            for name, documentation in (
                ("handled", "Messages whose effects and receipt are committed."),
                ("failed", "Calls of a handler that raised and that is retried."),
                ("duplicate", "Messages that were handled before, and skipped."),
                ("retried", "Retries, after a failure or as the handler asked."),
                ("dead_lettered", "Messages that became dead letters of the inbox."),
            )
        )
        self._handler_duration = LatencyHistogram(
            "pillarbox_consumer_handler_duration_seconds",
            "Time to handle a message and to commit.",
            ["consumer", "topic"],
            LONG,
            registry,
        )
        self._publish_to_handle = LatencyHistogram(
            "pillarbox_consumer_publish_to_handle_seconds",
            "Time from publishing a message until its handler was called, where the"
            " broker says when that was.",
            ["consumer"],
            LONG,
            registry,
        )
        self._add_to_handled = LatencyHistogram(
            "pillarbox_consumer_add_to_handled_seconds",
            "Time from adding a message until it was handled.",
            ["consumer"],
            LONG,
            registry,
        )
        self._in_flight = Gauge(
            "pillarbox_consumer_in_flight_messages",
            "Handlers that are running.",
            ["consumer"],
            registry=registry,
        )
        self._held = Gauge(
            "pillarbox_consumer_held_messages",
            "Messages that were fetched and are not settled yet.",
            ["consumer"],
            registry=registry,
        )
        self._blocked = Gauge(
            "pillarbox_consumer_blocked_keys",
            "Keys whose first message waits for its retry in this process.",
            ["consumer"],
            registry=registry,
        )
        self._blocked_age = Gauge(
            "pillarbox_consumer_blocked_key_age_seconds",
            "How long the longest of them has been waiting.",
            ["consumer"],
            registry=registry,
        )
        self._by_topic = (
            self._handled,
            self._failed,
            self._duplicate,
            self._retried,
            self._dead_lettered,
        )
        self._known: set[tuple[str, str]] = set()
        self._learn: dict[type[Event], Callable[[Any], None]] = {
            ConsumerStarted: self._note_started,
            MessageHandled: self._note_handled,
            DuplicateSkipped: lambda event: self._count(self._duplicate, event),
            HandlerFailed: self._note_failed,
            RetryRequested: lambda event: self._count(self._retried, event),
            MessageDeadLettered: lambda it: self._count(self._dead_lettered, it),
            ConsumerMeasured: self._note_measured,
            ConsumerStopped: self._note_stopped,
            BlockedKeysMeasured: self._note_blocked,
        }

    def __call__(self, event: Event) -> None:
        """Learn from an event."""
        learn = self._learn.get(type(event))
        if learn is not None:
            learn(event)

    def _count(self, counter: Counter, event: DeliveryEvent) -> None:
        labels = self._labels(event.consumer, event.topic)
        counter.labels(*labels).inc()

    def _labels(self, consumer: str, topic: str) -> tuple[str, str]:
        labels = consumer, self._topics.of(topic)
        if labels not in self._known:
            self._known.add(labels)
            # All at once, at 0: Prometheus sees no increase in what just appeared.
            for counter in self._by_topic:
                counter.labels(*labels)
        return labels

    def _note_started(self, event: ConsumerStarted) -> None:
        for topic in event.topics:
            if not topic.endswith("*"):
                self._labels(event.consumer, topic)

    def _note_handled(self, event: MessageHandled) -> None:
        self._count(self._handled, event)
        consumer, now = event.consumer, time.time()
        labels = self._labels(consumer, event.topic)
        self._handler_duration.of(*labels).add(event.seconds)
        added = seconds_since_epoch(event.id)
        if added is not None:
            self._add_to_handled.of(consumer).add(now - added)
        if event.published_at is not None:
            waited = now - event.seconds - event.published_at
            self._publish_to_handle.of(consumer).add(waited)

    def _note_failed(self, event: HandlerFailed) -> None:
        self._count(self._failed, event)
        self._count(self._retried, event)

    def _note_measured(self, event: ConsumerMeasured) -> None:
        self._in_flight.labels(event.consumer).set(event.in_flight)
        self._held.labels(event.consumer).set(event.held)

    def _note_stopped(self, event: ConsumerStopped) -> None:
        self._in_flight.labels(event.consumer).set(0)
        self._held.labels(event.consumer).set(0)

    def _note_blocked(self, event: BlockedKeysMeasured) -> None:
        self._blocked.labels(event.consumer).set(event.keys)
        self._blocked_age.clear()
        if event.age is not None:
            self._blocked_age.labels(event.consumer).set(event.age.total_seconds())
