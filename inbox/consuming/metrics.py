"""Prometheus metrics of a consumer; requires the extra `metrics`."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Gauge

from inbox.consuming.activity import ConsumerCounts
from inbox.events import (
    ConsumerMeasured,
    ConsumerStarted,
    ConsumerStopped,
    DuplicateSkipped,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from outbox.events import BlockedKeysMeasured, Event
from outbox.observability.latency import LONG, Latencies
from outbox.observability.prometheus import (
    OTHER,
    LatencyHistogram,
    Tallies,
    Tally,
    TopicLabels,
)


class _OfTopic(NamedTuple):
    """The counters and histogram of one topic."""

    handler_duration: Latencies
    handled: Tally
    failed: Tally
    duplicate: Tally
    retried: Tally
    dead_lettered: Tally


class ConsumerMetrics:
    """An observer that maintains the metrics of a consumer.

    Args:
        counts: an observer of the same consumer, whose latencies are exported.
    """

    def __init__(
        self, registry: CollectorRegistry, topics: TopicLabels, counts: ConsumerCounts
    ) -> None:
        self._topics = topics
        self._by_topic = [
            Tallies(
                f"pillarbox_consumer_messages_{name}",
                documentation,
                ["consumer", "topic"],
                registry,
            )
            for name, documentation in (
                ("handled", "Messages whose effects and receipt are committed."),
                ("failed", "Calls of a handler that raised and that is retried."),
                ("duplicate", "Messages that were handled before, and skipped."),
                ("retried", "Retries, after a failure or as the handler asked."),
                ("dead_lettered", "Messages that became dead letters of the inbox."),
            )
        ]
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
        LatencyHistogram(
            "pillarbox_consumer_add_to_handled_seconds",
            "Time from adding a message until it was handled.",
            ["consumer"],
            LONG,
            registry,
        ).share(counts.latencies, counts.consumer)
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
        self._known: dict[tuple[str, str], _OfTopic] = {}
        # Cached by topic, which is faster than finding the label. Topics that share a
        # label are left out.
        self._by_name: dict[tuple[str, str], _OfTopic] = {}
        self._learn: dict[type[Event], Callable[[Any], None]] = {
            ConsumerStarted: self._note_started,
            MessageHandled: self._note_handled,
            DuplicateSkipped: self._note_duplicate,
            HandlerFailed: self._note_failed,
            RetryRequested: self._note_retry,
            MessageDeadLettered: self._note_dead_lettered,
            ConsumerMeasured: self._note_measured,
            ConsumerStopped: self._note_stopped,
            BlockedKeysMeasured: self._note_blocked,
        }

    def __call__(self, event: Event) -> None:
        """Record an event in the metrics."""
        learn = self._learn.get(type(event))
        if learn is not None:
            learn(event)

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
                *(tallies.of(*labels) for tallies in self._by_topic),
            )
        if label != OTHER:
            self._by_name[consumer, topic] = known
        return known

    def _note_started(self, event: ConsumerStarted) -> None:
        for topic in event.topics:
            if not topic.endswith("*"):
                self._of(event.consumer, topic)

    def _note_handled(self, event: MessageHandled) -> None:
        known = self._of(event.consumer, event.topic)
        known.handled.count += 1
        known.handler_duration.add(event.seconds)
        if event.published_at is not None:
            waited = time.time() - event.seconds - event.published_at
            self._publish_to_handle.of(event.consumer).add(waited)

    def _note_duplicate(self, event: DuplicateSkipped) -> None:
        self._of(event.consumer, event.topic).duplicate.count += 1

    def _note_retry(self, event: RetryRequested) -> None:
        self._of(event.consumer, event.topic).retried.count += 1

    def _note_dead_lettered(self, event: MessageDeadLettered) -> None:
        self._of(event.consumer, event.topic).dead_lettered.count += 1

    def _note_failed(self, event: HandlerFailed) -> None:
        known = self._of(event.consumer, event.topic)
        known.failed.count += 1
        known.retried.count += 1

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
