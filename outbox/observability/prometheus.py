"""Turn events into metrics for Prometheus; needs the extra `metrics`.

Every event is counted by name, so a new event needs no code here. Relay and consumer
define further metrics in `relay/metrics.py` and `inbox/consuming/metrics.py`, which
share the registry and the topic labels.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Final, cast

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.aiohttp import make_aiohttp_handler
from prometheus_client.core import (
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from typing_extensions import override

from outbox.administration.check import Severity
from outbox.events import Event
from outbox.logs.printable import printable
from outbox.observability.database_measure import DatabaseMeasured, DatabaseNotMeasured
from outbox.observability.http_server import Handler
from outbox.observability.latency import Latencies
from outbox.observability.measures.failures import Reason
from outbox.observability.overview import Overview

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


class DatabaseMetrics(Collector):
    """An observer that exports the last measurement, labelled with the database's name.

    Before the first one and after a failed one only its time is left, 0 for never,
    which an alert compares with the present.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._measured: DatabaseMeasured | None = None
        self._last: Overview | None = None
        registry.register(self)

    def __call__(self, event: Event) -> None:
        """Keep the measurement that an event reports."""
        if isinstance(event, DatabaseMeasured):
            self._measured = event
            self._last = event.overview
        elif isinstance(event, DatabaseNotMeasured):
            self._measured = None

    @override
    def collect(self) -> Iterable[Metric]:
        """Return the samples."""
        found, last = self._measured, self._last

        def gauge(
            name: str,
            documentation: str,
            samples: Mapping[tuple[str, ...], float],
            *labels: str,
        ) -> Metric:
            names = ["database", *labels]
            family = GaugeMetricFamily(name, documentation, labels=names)
            for values, value in samples.items():
                family.add_metric([last.database if last else "", *values], value)
            return family

        yield gauge(
            "pillarbox_database_measured_timestamp_seconds",
            "When this process last measured the database; 0: never.",
            {(): last.at.timestamp() if last else 0},
        )
        findings = found.findings if found else ()
        yield gauge(
            "pillarbox_findings",
            "What pillarbox status finds wrong, as far as this process can see.",
            collections.Counter(
                (it.check, it.severity)
                for it in findings
                if it.severity is not Severity.HINT
            ),
            "check",
            "severity",
        )
        backlog = found.overview.outbox if found else None
        estimated = None if backlog is None else backlog.estimated
        yield gauge(
            "pillarbox_outbox_backlog_messages",
            "Messages that are not settled, estimated if there are many.",
            {} if estimated is None else {(): estimated},
        )
        waited = (backlog.waited if backlog else None) or timedelta(0)
        yield gauge(
            "pillarbox_outbox_oldest_waiting_seconds",
            "How long the oldest message that is due has waited.",
            {} if backlog is None else {(): waited.total_seconds()},
        )
        reasons: dict[tuple[str, ...], list[Reason]] = collections.defaultdict(list)
        for letters in found.overview.dead_letters if found else ():
            for reason in letters.reasons:
                reasons[letters.side, reason.origin].append(reason)
        yield gauge(
            "dead_letter_total",
            "PENDING dead letters, of the newest 10,000.",
            {of: sum(it.pending for it in each) for of, each in reasons.items()},
            "schema",
            "origin",
        )
        yield gauge(
            "dead_letter_age_seconds",
            "Age of the oldest PENDING dead letter, of the newest 10,000.",
            {
                of: max(it.age for it in each).total_seconds()
                for of, each in reasons.items()
            },
            "schema",
            "origin",
        )
