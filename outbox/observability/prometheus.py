"""Turn events into metrics for Prometheus; needs the extra `metrics`.

Every event is counted by name, so a new event needs no code here. Relay and consumer
define further metrics in `relay/metrics.py` and `inbox/consuming/metrics.py`, which
share the registry and the topic labels.
"""

from collections import Counter as Counts
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Final, cast

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.aiohttp import make_aiohttp_handler
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from typing_extensions import override

from pillarbox.outbox.administration.check import Finding, Severity
from pillarbox.outbox.events import Event
from pillarbox.outbox.logs.printable import printable
from pillarbox.outbox.observability.database_measure import (
    DatabaseMeasured,
    DatabaseNotMeasured,
)
from pillarbox.outbox.observability.http_server import Handler
from pillarbox.outbox.observability.latency import Latencies
from pillarbox.outbox.observability.overview import Overview

OTHER: Final = "other"
"""The label shared by all topics without their own label."""
_MOST_TOPICS: Final = 100
_MAX_LABEL: Final = 200


class TopicLabels:
    """The values of the label `topic`: the first topics that occur, and `other`.

    Each label has its own time series, so their number must be bounded, even if a
    producer keeps inventing topics. For one event loop.

    Args:
        limit: how many topics get their own label.
    """

    def __init__(self, limit: int = _MOST_TOPICS) -> None:
        self._limit = limit
        self._labels: dict[str, str] = {}

    def of(self, topic: str) -> str:
        """Return the label of a topic."""
        label = self._labels.get(topic)
        if label is None:
            if len(self._labels) >= self._limit:
                return OTHER
            label = self._labels[topic] = printable(topic[:_MAX_LABEL])
        return label


class LatencyHistogram(Collector):
    """A histogram that accepts the durations of a whole batch at once.

    Args:
        registry: where the histogram registers itself.
        labels: the names of the labels.
        bounds: the upper bounds of the buckets, in seconds.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        bounds: tuple[float, ...],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._bounds = bounds
        self._latencies: dict[tuple[str, ...], Latencies] = {}
        if not labels:
            self.of()
        registry.register(self)

    def share(self, latencies: Latencies, *values: str) -> None:
        """Export durations that are collected elsewhere, in the same buckets."""
        self._latencies[values] = latencies

    def of(self, *values: str) -> Latencies:
        """Return the durations with these label values."""
        latencies = self._latencies.get(values)
        if latencies is None:
            latencies = self._latencies[values] = Latencies(self._bounds)
        return latencies

    @override
    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Return the histogram's samples."""
        family = HistogramMetricFamily(
            self._name, self._documentation, labels=self._labels
        )
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for values, latencies in self._latencies.items():
            buckets, below = [], 0
            for name, count in zip(names, latencies.counts, strict=True):
                below += count
                buckets.append((name, float(below)))
            family.add_metric(values, buckets, latencies.sum)
        return [family]


class PrometheusEvents:
    """An observer that maintains the metrics common to relay and consumer.

    Args:
        registry: where the metrics are registered; by default, a new one that refuses
            a second metric with the same name.

    Attributes:
        topics: the topic labels, which all metrics of the process share.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry(auto_describe=True)
        self.topics = TopicLabels()
        self._events = Counter(
            "pillarbox_events",
            "Events by name.",
            ["event", "consumer"],
            registry=self.registry,
        )
        # Finding a counter by its labels takes longer than counting.
        self._by_event: dict[tuple[type[Event], str], Counter] = {}

    def __call__(self, event: Event) -> None:
        """Count one event."""
        kind, consumer = type(event), getattr(event, "consumer", "")
        counter = self._by_event.get((kind, consumer))
        if counter is None:
            counter = self._events.labels(kind.__name__, consumer)
            self._by_event[kind, consumer] = counter
        counter.inc()

    def handlers(self) -> Mapping[str, Handler]:
        """Return the handlers of scrape requests, by path."""
        handler = make_aiohttp_handler(self.registry)
        # It reads only the query and the headers of the request.
        return {"/metrics": cast("Handler", handler)}


class DatabaseMetrics:
    """An observer that exports the last measurement, labelled with the database's name.

    Before the first one and after a failed one only its time is left, 0 for never,
    which an alert compares with the present.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, documentation: str, *labels: str) -> Gauge:
            names = ["database", *labels]
            return Gauge(name, documentation, names, registry=registry)

        self._at = gauge(
            "pillarbox_database_measured_timestamp_seconds",
            "When this process last measured the database; 0: never.",
        )
        self._findings = gauge(
            "pillarbox_findings",
            "Problems found by pillarbox status, as far as this process sees them.",
            *("check", "severity"),
        )
        self._backlog = gauge(
            "pillarbox_outbox_backlog_messages",
            "Messages that relays have not settled, estimated if there are many.",
        )
        self._oldest = gauge(
            "pillarbox_outbox_oldest_waiting_seconds",
            "Lag: how long the oldest due message has been waiting.",
        )
        self._letters = gauge(
            "dead_letter_total",
            "PENDING dead letters, among the newest 10,000.",
            *("schema", "origin"),
        )
        self._letter_age = gauge(
            "dead_letter_age_seconds",
            "Age of the oldest PENDING dead letter, among the newest 10,000.",
            *("schema", "origin"),
        )
        self._at.labels("").set(0)

    def __call__(self, event: Event) -> None:
        """Keep the measurement that an event reports."""
        if isinstance(event, DatabaseMeasured | DatabaseNotMeasured):
            for gauge in (self._findings, self._backlog, self._oldest):
                gauge.clear()
            self._letters.clear()
            self._letter_age.clear()
        if isinstance(event, DatabaseMeasured):
            self._record(event.overview, event.findings)

    def _record(self, overview: Overview, findings: Sequence[Finding]) -> None:
        name = overview.database
        self._at.clear()
        self._at.labels(name).set(overview.at.timestamp())
        found = Counts(
            (name, it.check, it.severity)
            for it in findings
            if it.severity is not Severity.HINT
        )
        for labels, count in found.items():
            self._findings.labels(*labels).set(count)
        backlog = overview.outbox
        if backlog is not None:
            if backlog.estimated is not None:
                self._backlog.labels(name).set(backlog.estimated)
            waited = backlog.waited or timedelta(0)
            self._oldest.labels(name).set(waited.total_seconds())
        pending: Counts[tuple[str, str, str]] = Counts()
        ages: dict[tuple[str, str, str], timedelta] = {}
        for side in overview.dead_letters:
            for reason in side.reasons:
                of = name, side.side, reason.origin
                pending[of] += reason.pending
                ages[of] = max(reason.age, ages.get(of, reason.age))
        for each, age in ages.items():
            self._letters.labels(*each).set(pending[each])
            self._letter_age.labels(*each).set(age.total_seconds())
