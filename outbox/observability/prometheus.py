"""Turn events into metrics for Prometheus; needs the extra `metrics`.

Every event is counted by name, so a new event needs no code here. Relay and consumer
define further metrics in `relay/metrics.py` and `inbox/consuming/metrics.py`, which
share the registry and the topic labels.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Final, TypeAlias, cast

from prometheus_client import CollectorRegistry
from prometheus_client.aiohttp import make_aiohttp_handler
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from typing_extensions import override

from outbox.events import Event
from outbox.logs.printable import printable
from outbox.observability.database_measure import DatabaseMeasured, DatabaseNotMeasured
from outbox.observability.http_server import Handler
from outbox.observability.latency import Latencies
from outbox.observability.measures.failures import Reason
from outbox.observability.measures.tables import Table
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


class Tally:
    """One counter; callers add to `count`."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Tallies(Collector):
    """Counters with labels, cheap enough to update for every message.

    For one event loop.

    Args:
        labels: the names of the labels.
        registry: where the counters register themselves.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._tallies: dict[tuple[str, ...], Tally] = {}
        registry.register(self)

    def of(self, *values: str) -> Tally:
        """Return the counter with these label values; a new one starts at 0."""
        tally = self._tallies.get(values)
        if tally is None:
            tally = self._tallies[values] = Tally()
        return tally

    def describe(self) -> Iterable[CounterMetricFamily]:
        """Return the counters' name, so that no other metric can use it."""
        return [self._family()]

    @override
    def collect(self) -> Iterable[CounterMetricFamily]:
        """Return the counters' samples."""
        family = self._family()
        for values, tally in self._tallies.items():
            family.add_metric(values, tally.count)
        return [family]

    def _family(self) -> CounterMetricFamily:
        return CounterMetricFamily(self._name, self._documentation, labels=self._labels)


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

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """Return the histogram's name, so that no other metric can use it."""
        return [self._family()]

    @override
    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Return the histogram's samples."""
        family = self._family()
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for values, latencies in self._latencies.items():
            buckets, below = [], 0
            for name, count in zip(names, latencies.counts, strict=True):
                below += count
                buckets.append((name, float(below)))
            family.add_metric(values, buckets, latencies.sum)
        return [family]

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(
            self._name, self._documentation, labels=self._labels
        )


class PrometheusEvents:
    """An observer that maintains the metrics common to relay and consumer.

    Args:
        registry: where the metrics are registered; a new one if omitted.

    Attributes:
        topics: the topic labels, which all metrics of the process share.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.topics = TopicLabels()
        self._events = Tallies(
            "pillarbox_events", "Events by name.", ["event", "consumer"], self.registry
        )
        self._by_event: dict[tuple[type[Event], str], Tally] = {}

    def __call__(self, event: Event) -> None:
        """Count one event."""
        kind, consumer = type(event), getattr(event, "consumer", "")
        tally = self._by_event.get((kind, consumer))
        if tally is None:
            tally = self._events.of(kind.__name__, consumer)
            self._by_event[kind, consumer] = tally
        tally.count += 1

    def handlers(self) -> Mapping[str, Handler]:
        """Return the handlers of scrape requests, by path."""
        handler = make_aiohttp_handler(self.registry)
        # It reads only the query and the headers of the request.
        return {"/metrics": cast("Handler", handler)}


class DatabaseMetrics(Collector):
    """An observer that exports the last measurement, labelled with the database's name.

    After a failed one only its time is left, which alerts compare with the present.
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

    def describe(self) -> Iterable[Metric]:
        """Return the names, so that no other metric can use them."""
        return self.collect()

    @override
    def collect(self) -> Iterable[Metric]:
        """Return the samples."""
        found, last = self._measured, self._last

        def gauge(
            name: str,
            documentation: str,
            samples: Iterable[tuple[tuple[str, ...], float]],
            *labels: str,
        ) -> Metric:
            names = ["database", *labels]
            family = GaugeMetricFamily(name, documentation, labels=names)
            for values, value in samples:
                family.add_metric([last.database if last else "", *values], value)
            return family

        yield gauge(
            "pillarbox_database_measured_timestamp_seconds",
            "When the database was last measured.",
            [((), last.at.timestamp())] if last else (),
        )
        for name, documentation, read in _SINGLE:
            value = read(found) if found else None
            if isinstance(value, timedelta):
                value = value.total_seconds()
            yield gauge(name, documentation, () if value is None else [((), value)])
        for name, documentation, read_table in _BY_TABLE:
            tables = found.overview.tables if found else ()
            samples = (((it.table,), read_table(it)) for it in tables)
            yield gauge(name, documentation, samples, "table")
        reasons: dict[tuple[str, str], list[Reason]] = defaultdict(list)
        for letters in found.overview.dead_letters if found else ():
            for reason in letters.reasons:
                reasons[letters.side, reason.origin].append(reason)
        yield gauge(
            "dead_letter_total",
            "PENDING dead letters, of the newest 10,000.",
            ((of, sum(it.pending for it in each)) for of, each in reasons.items()),
            "schema",
            "origin",
        )
        yield gauge(
            "dead_letter_age_seconds",
            "Age of the oldest PENDING dead letter, of the newest 10,000.",
            (
                (of, max(it.age for it in each).total_seconds())
                for of, each in reasons.items()
            ),
            "schema",
            "origin",
        )


_Read: TypeAlias = Callable[[DatabaseMeasured], float | timedelta | None]
_SINGLE: Final[Sequence[tuple[str, str, _Read]]] = (
    (
        "pillarbox_outbox_backlog_messages",
        "Messages that are not settled, estimated if there are many.",
        lambda it: it.overview.outbox.estimated if it.overview.outbox else None,
    ),
    (
        "pillarbox_outbox_oldest_waiting_seconds",
        "How long the oldest message that is due has waited.",
        lambda it: it.overview.outbox.waited or 0 if it.overview.outbox else None,
    ),
    (
        "pillarbox_pinned_seconds",
        "How long the oldest transaction has been in use.",
        lambda it: it.pinned_for,
    ),
    (
        "pillarbox_database_upkeep_age_seconds",
        "Time since the last successful upkeep of the partitions.",
        lambda it: it.overview.upkeep.age if it.overview.upkeep else None,
    ),
    (
        "pillarbox_database_upkeep_failing",
        "1 if the upkeep of the partitions has failed since its last success.",
        lambda it: it.overview.upkeep.is_failing if it.overview.upkeep else None,
    ),
    (
        "pillarbox_database_unmeasured_parts",
        "Parts of the database that could not be measured.",
        lambda it: len(it.overview.missing),
    ),
)
_BY_TABLE: Final[Sequence[tuple[str, str, Callable[[Table], int]]]] = (
    (
        "pillarbox_partitions_ahead",
        "Partitions of a table that have not begun yet.",
        lambda it: it.ahead,
    ),
    (
        "pillarbox_partition_gaps",
        "Partitions that are missing for now or between those ahead.",
        lambda it: it.gaps + (not it.has_today),
    ),
    (
        "pillarbox_partitions_held",
        "Partitions past their retention that unsettled rows keep.",
        lambda it: len(it.held),
    ),
    (
        "pillarbox_table_bytes",
        "Size of a table's partitions with their indexes.",
        lambda it: it.bytes or 0,
    ),
)
