"""Events of every kind become metrics."""

import asyncio
import re
import urllib.request
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from pillarbox.inbox.consuming.activity import ConsumerCounts
from pillarbox.inbox.consuming.metrics import ConsumerMetrics
from pillarbox.inbox.events import DuplicateSkipped, MessageHandled
from pillarbox.outbox.cli.supervisor import Watching
from pillarbox.outbox.observability.endpoints import listening
from pillarbox.outbox.observability.prometheus import (
    OTHER,
    DatabaseMetrics,
    LatencyHistogram,
    PrometheusEvents,
    TopicLabels,
)
from pillarbox.relay.activity import RelayCounts
from pillarbox.relay.events import BatchSettled
from pillarbox.relay.metrics import RelayMetrics


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_events_are_counted_by_name_and_consumer() -> None:
    metrics = PrometheusEvents()
    for _ in range(2):
        metrics(
            BatchSettled(published=3, retried=0, dead_lettered=1, seconds=0.02),
        )
    settled = {"event": "BatchSettled", "consumer": ""}
    assert value(metrics.registry, "pillarbox_events_total", **settled) == 2
    about = {"id": uuid4(), "topic": "t", "key": None}
    metrics(MessageHandled(consumer="billing", seconds=0.1, **about))  # type: ignore[arg-type]
    metrics(DuplicateSkipped(consumer="shipping", **about))  # type: ignore[arg-type]
    for consumer, event in (
        ("billing", "MessageHandled"),
        ("shipping", "DuplicateSkipped"),
    ):
        counted = {"event": event, "consumer": consumer}
        assert value(metrics.registry, "pillarbox_events_total", **counted) == 1


@given(st.lists(st.text()), st.integers(0, 5))
def test_at_most_the_limit_of_topics_have_labels(topics: list[str], limit: int) -> None:
    labels = TopicLabels(limit)
    given = [labels.of(topic) for topic in topics]
    assert len({*given} - {OTHER}) <= limit
    first = [*dict.fromkeys(topics)][:limit]
    for topic, label in zip(topics, given, strict=True):
        assert label == (labels.of(topic) if topic in first else OTHER)
        assert label.isprintable()
    assert len(labels.of("x" * 1000)) < 250


def test_a_histogram_has_cumulative_buckets() -> None:
    registry = CollectorRegistry()
    histogram = LatencyHistogram("wait_seconds", "Waits.", ["who"], (0.1, 1), registry)
    for seconds in (0.05, 0.1, 0.5, 9):
        histogram.of("a").add(seconds)
    buckets = [
        value(registry, "wait_seconds_bucket", who="a", le=le)
        for le in ("0.1", "1.0", "+Inf")
    ]
    assert buckets == [2, 3, 4]
    assert value(registry, "wait_seconds_count", who="a") == 4
    assert value(registry, "wait_seconds_sum", who="a") == pytest.approx(9.65)


async def test_metrics_are_served_on_the_given_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "pillarbox")
    assert Watching().metrics() is None
    metrics = PrometheusEvents()
    metrics(BatchSettled(published=1, retried=0, dead_lettered=0, seconds=0.1))
    async with listening("127.0.0.1:0", metrics.handlers()):
        (address,) = re.findall(r"listening on (\S+)", caplog.text)
        url = f"http://{address}/metrics"
        answer = await asyncio.to_thread(urllib.request.urlopen, url, timeout=60)
        with answer:
            said = answer.read().decode()
    assert 'pillarbox_events_total{consumer="",event="BatchSettled"} 1.0' in said


def test_metric_names_follow_the_conventions_of_prometheus() -> None:
    metrics = PrometheusEvents()
    RelayMetrics(metrics.registry, metrics.topics, RelayCounts())
    ConsumerMetrics(metrics.registry, metrics.topics, ConsumerCounts("billing"))
    DatabaseMetrics(metrics.registry)
    for family in metrics.registry.collect():
        assert family.documentation
        if family.type == "histogram":
            assert family.name.endswith("_seconds")
        if family.name not in {"dead_letter_total", "dead_letter_age_seconds"}:
            assert family.name.startswith("pillarbox_")
            assert family.type == "counter" or not family.name.endswith("_total")
