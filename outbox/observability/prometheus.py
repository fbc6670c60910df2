"""Turn events into metrics for Prometheus; needs the extra `metrics`.

Every event is counted under its name. Its numbers are added up under the names of
their fields, and durations go into a histogram. So a new event has metrics without a
line here.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Final, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.aiohttp import make_aiohttp_handler

from outbox.dead_letters.events import DeadLettersMeasured
from outbox.dead_letters.letter import Status
from outbox.events import BlockedKeysMeasured, Event, UpkeepMeasured
from outbox.observability.http_server import Handler

# Numbers whose sum means nothing.
_NO_AMOUNTS: Final = frozenset({"attempts", "retry_count", "lanes", "keys"})
_BUCKETS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class PrometheusEvents:
    """An observer that keeps metrics.

    Args:
        registry: where they are registered; a new one if left out.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._events = Counter(
            "pillarbox_events",
            "Events by name.",
            ["event", "consumer"],
            registry=self.registry,
        )
        self._amounts = Counter(
            "pillarbox_event_amounts",
            "Sums of the numbers in events, such as published in BatchSettled.",
            ["event", "field", "consumer"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "pillarbox_event_seconds",
            "Durations and delays by event.",
            ["event", "consumer"],
            buckets=_BUCKETS,
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
        self._blocked = Gauge(
            "blocked_key_total",
            "Keys whose first message is waiting for its retry in this process.",
            ["consumer"],
            registry=self.registry,
        )
        self._blocked_age = Gauge(
            "blocked_key_age_seconds",
            "How long the longest of them has been waiting.",
            ["consumer"],
            registry=self.registry,
        )
        self._upkeep_age = Gauge(
            "upkeep_age_seconds",
            "Time since the last successful upkeep of the partitions.",
            registry=self.registry,
        )
        self._upkeep_failing = Gauge(
            "upkeep_failing",
            "1 if the upkeep of the partitions has failed since its last success, or"
            " distrusts the server's clock.",
            registry=self.registry,
        )

    def __call__(self, event: Event) -> None:
        """Count one event."""
        if isinstance(event, DeadLettersMeasured):
            self._measure(event)
        elif isinstance(event, BlockedKeysMeasured):
            self._measure_blocked(event)
        elif isinstance(event, UpkeepMeasured):
            self._measure_upkeep(event)
        name = type(event).__name__
        consumer = getattr(event, "consumer", "")
        self._events.labels(name, consumer).inc()
        for field in fields(event):
            value = getattr(event, field.name)
            if field.name == "seconds" and isinstance(value, float):
                self._seconds.labels(name, consumer).observe(value)
            elif type(value) is int and field.name not in _NO_AMOUNTS:
                self._amounts.labels(name, field.name, consumer).inc(value)

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

    def _measure_blocked(self, event: BlockedKeysMeasured) -> None:
        self._blocked.labels(event.consumer).set(event.keys)
        self._blocked_age.clear()
        if event.age is not None:
            self._blocked_age.labels(event.consumer).set(event.age.total_seconds())

    def _measure_upkeep(self, event: UpkeepMeasured) -> None:
        self._upkeep_failing.set(event.is_failing)
        if event.age is not None:
            self._upkeep_age.set(event.age.total_seconds())

    def handlers(self) -> Mapping[str, Handler]:
        """Return what answers scrapes, by path."""
        handler = make_aiohttp_handler(self.registry)
        # It only reads the query and the headers of the request.
        return {"/metrics": cast("Handler", handler)}
