"""Turn events into metrics for Prometheus; needs the extra `metrics`.

Every event is counted under its name. Its numbers are added up under the names of
their fields, and how long something took goes into a histogram. So an event that is
new has its metrics without a line here.
"""

from dataclasses import fields
from socket import socket
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    make_wsgi_app,
)
from typing_extensions import override

from outbox.dead_letters.events import DeadLettersMeasured
from outbox.dead_letters.letter import Status
from outbox.events import BlockedKeysMeasured, Event, UpkeepMeasured
from outbox.observability.listen_address import ListenAddress, address_of

# Numbers that tell of one message or of the state of things, and add up to nothing.
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
            "Events, by their name.",
            ["event", "consumer"],
            registry=self.registry,
        )
        self._amounts = Counter(
            "pillarbox_event_amounts",
            "What the numbers in events add up to, e.g. published in BatchSettled.",
            ["event", "field", "consumer"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "pillarbox_event_seconds",
            "How long it took, or is to be waited for, by event.",
            ["event", "consumer"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._letters = Gauge(
            "dead_letter_total",
            "Dead letters in the table, by state.",
            ["schema", "origin", "status"],
            registry=self.registry,
        )
        self._age = Gauge(
            "dead_letter_age_seconds",
            "Age of the oldest dead letter that is PENDING.",
            ["schema", "origin"],
            registry=self.registry,
        )
        self._blocked = Gauge(
            "blocked_key_total",
            "Keys whose head waits for its retry in this process.",
            ["consumer"],
            registry=self.registry,
        )
        self._blocked_age = Gauge(
            "blocked_key_age_seconds",
            "How long the first of them has been waiting.",
            ["consumer"],
            registry=self.registry,
        )
        self._upkeep_age = Gauge(
            "upkeep_age_seconds",
            "How long ago the upkeep of the partitions last succeeded.",
            registry=self.registry,
        )
        self._upkeep_failing = Gauge(
            "upkeep_failing",
            "1 if the upkeep of the partitions failed since its last success, or"
            " refuses the server's clock.",
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
        # What is gone has to go: a group without dead letters is not in the event.
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

    def serve(self, address: ListenAddress) -> "MetricsServer":
        """Answer scrapes on this address, in a thread.

        Raises:
            ConfigError: it can't be listened on.
        """
        return MetricsServer(address.listen("metrics-listen"), self.registry)


class MetricsServer:
    """A thread that answers scrapes on a socket that listens.

    Attributes:
        address: where.
    """

    def __init__(self, listening: socket, registry: CollectorRegistry) -> None:
        self.address = address_of(listening)
        self._server = _Server(("", self.address.port), _Silent, False)
        self._server.socket.close()
        self._server.socket = listening
        self._server.server_name = self.address.host
        self._server.server_port = self.address.port
        self._server.setup_environ()
        self._server.set_app(make_wsgi_app(registry))
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more, and return when nothing is left of it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    """A scrape that takes long, or a client that says nothing, holds up no other."""

    daemon_threads = True


class _Silent(WSGIRequestHandler):
    timeout = 30.0

    @override
    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing: scrapes come every few seconds."""
