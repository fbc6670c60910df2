"""Turn events into metrics for Prometheus; needs the extra `metrics`.

Every event is counted under its name, so a new event has a metric without a line here.
What relay and consumer measure beyond that is in `relay/metrics.py` and
`inbox/consuming/metrics.py`, which share the registry and the labels for topics.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, cast

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.aiohttp import make_aiohttp_handler
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from typing_extensions import override

from outbox.dead_letters.events import DeadLettersMeasured
from outbox.dead_letters.letter import Status
from outbox.errors import ConfigError
from outbox.events import Event, UpkeepMeasured
from outbox.observability.http_server import Handler
from outbox.observability.latency import Latencies
from outbox.observability.printable import printable

OTHER: Final = "other"
"""The label of all topics that have none of their own."""
DEFAULT_TOPICS: Final = 100
_MAX_LABEL: Final = 200


class TopicLabels:
    """The values of the label `topic`: the first topics that are met, and `other`.

    Each topic has its own time series, so their number must be bounded, even if a
    producer makes topics up. For one event loop.

    Args:
        limit: how many topics have a label of their own.

    Raises:
        ConfigError: the limit is negative.
    """

    def __init__(self, limit: int = DEFAULT_TOPICS) -> None:
        if limit < 0:
            raise ConfigError(f"metrics-topics={limit}: must be at least 0")
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
    """A histogram that takes the durations of a whole batch at once.

    Args:
        registry: where it registers itself.
        labels: the names of its labels.
        bounds: the upper bounds of its buckets, in seconds.
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

    def of(self, *values: str) -> Latencies:
        """Return the durations with these values of the labels."""
        latencies = self._latencies.get(values)
        if latencies is None:
            latencies = self._latencies[values] = Latencies(self._bounds)
        return latencies

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """Give its name, so that no other metric may have it."""
        return [self._family()]

    @override
    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Give its samples."""
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
    """An observer that keeps the metrics that relay and consumer have in common.

    Args:
        registry: where they are registered; a new one if left out.
        topics: the labels for topics, which all metrics of the process share.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        topics: TopicLabels | None = None,
    ) -> None:
        self.registry = registry or CollectorRegistry()
        self.topics = topics or TopicLabels()
        self._events = Counter(
            "pillarbox_events",
            "Events by name.",
            ["event", "consumer"],
            registry=self.registry,
        )
        self._letters = Gauge(
            "dead_letter_total",
            "Dead letters in the table by status.",
            ["schema", "origin", "status"],
            registry=self.registry,
        )
        self._age = Gauge(
            "dead_letter_age_seconds",
            "Age of the oldest PENDING dead letter.",
            ["schema", "origin"],
            registry=self.registry,
        )
        self._upkeep_age = Gauge(
            "pillarbox_upkeep_age_seconds",
            "Time since the last successful upkeep of the partitions.",
            registry=self.registry,
        )
        self._upkeep_failing = Gauge(
            "pillarbox_upkeep_failing",
            "1 if the upkeep of the partitions has failed since its last success, or"
            " distrusts the server's clock.",
            registry=self.registry,
        )

    def __call__(self, event: Event) -> None:
        """Count one event."""
        if isinstance(event, DeadLettersMeasured):
            self._measure(event)
        elif isinstance(event, UpkeepMeasured):
            self._measure_upkeep(event)
        name = type(event).__name__
        self._events.labels(name, getattr(event, "consumer", "")).inc()

    def _measure(self, event: DeadLettersMeasured) -> None:
        # A group without dead letters isn't in the event.
        self._letters.clear()
        self._age.clear()
        for group in event.groups:
            self._letters.labels(event.schema, group.origin, group.status.value).set(
                group.letters
            )
            if group.status is Status.PENDING:
                self._age.labels(event.schema, group.origin).set(group.seconds)

    def _measure_upkeep(self, event: UpkeepMeasured) -> None:
        self._upkeep_failing.set(event.is_failing)
        if event.age is not None:
            self._upkeep_age.set(event.age.total_seconds())

    def handlers(self) -> Mapping[str, Handler]:
        """Return what answers scrapes, by path."""
        handler = make_aiohttp_handler(self.registry)
        # It only reads the query and the headers of the request.
        return {"/metrics": cast("Handler", handler)}
