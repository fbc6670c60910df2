"""Write the reference page of metrics."""

from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Metric

from pillarbox.inbox.consuming.activity import ConsumerCounts
from pillarbox.inbox.consuming.metrics import ConsumerMetrics
from pillarbox.outbox.observability.prometheus import DatabaseMetrics, PrometheusEvents
from pillarbox.relay.activity import RelayCounts
from pillarbox.relay.metrics import RelayMetrics

PAGE: Final = Path(__file__).parent / "metrics.md"

_INTRODUCTION: Final = """\
# Metrics

<!-- Written by `make reference` from the code. -->

`--listen` of `pillarbox relay` and `pillarbox consume` serves them at `/metrics`;
[monitoring](../monitoring.md#metrics) explains how to read them.
"""
_SECTIONS: Final = (
    ("the relay", ("pillarbox_relay_",)),
    ("the consumer", ("pillarbox_consumer_",)),
    ("both", ("pillarbox_events_",)),
    ("the database, as each process measures it", ("pillarbox_", "dead_letter_")),
)


def registry() -> CollectorRegistry:
    """Return a registry with all metrics of relays and consumers."""
    events = PrometheusEvents(CollectorRegistry())
    RelayMetrics(events.registry, events.topics, RelayCounts())
    ConsumerMetrics(events.registry, events.topics, ConsumerCounts("billing"))
    DatabaseMetrics(events.registry)
    return events.registry


def page() -> str:
    """Return the whole page."""
    left = {name_of(metric): metric for metric in registry().collect()}
    parts = [_INTRODUCTION]
    for title, prefixes in _SECTIONS:
        found = [name for name in left if name.startswith(prefixes)]
        rows = "".join(_row(name, left.pop(name)) for name in sorted(found))
        parts.append(f"## Of {title}\n\n| metric | type | |\n|---|---|---|\n{rows}")
    assert not left, left
    return "\n".join(parts)


def name_of(metric: Metric) -> str:
    """Return the name under which Prometheus stores a metric."""
    return metric.name + ("_total" if metric.type == "counter" else "")


def _row(name: str, metric: Metric) -> str:
    return f"| `{name}` | {metric.type} | {metric.documentation.rstrip('.')} |\n"
