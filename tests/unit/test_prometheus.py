"""Events become metrics, whatever they are."""

import argparse
import urllib.request
from uuid import uuid4

import pytest
from prometheus_client import CollectorRegistry

from inbox.events import DuplicateSkipped, MessageHandled
from outbox.dead_letters import Status
from outbox.dead_letters.events import DeadLetterGroup, DeadLettersMeasured
from outbox.errors import ConfigError
from outbox.observability.listen_address import ListenAddress
from outbox.observability.metrics import serve_metrics
from outbox.observability.prometheus import PrometheusEvents
from relay.events import BatchSettled


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_events_are_counted_and_their_numbers_added_up() -> None:
    metrics = PrometheusEvents()
    for published in (3, 4):
        metrics(
            BatchSettled(published=published, retried=0, dead_lettered=1, seconds=0.02)
        )
    settled = {"event": "BatchSettled", "consumer": ""}
    assert value(metrics.registry, "pillarbox_events_total", **settled) == 2
    amount = "pillarbox_event_amounts_total"
    assert value(metrics.registry, amount, field="published", **settled) == 7
    assert value(metrics.registry, amount, field="dead_lettered", **settled) == 2
    assert value(metrics.registry, "pillarbox_event_seconds_count", **settled) == 2


def test_consumers_are_told_apart() -> None:
    metrics = PrometheusEvents()
    about = {"id": uuid4(), "topic": "t", "key": None}
    metrics(MessageHandled(consumer="billing", seconds=0.1, **about))  # type: ignore[arg-type]
    metrics(DuplicateSkipped(consumer="shipping", **about))  # type: ignore[arg-type]
    events = "pillarbox_events_total"
    for consumer, event in (
        ("billing", "MessageHandled"),
        ("shipping", "DuplicateSkipped"),
    ):
        found = value(metrics.registry, events, event=event, consumer=consumer)
        assert found == 1


def test_dead_letters_show_as_they_were_last_measured() -> None:
    metrics = PrometheusEvents()
    origin = {"schema": "inbox", "origin": "consumer:billing"}
    metrics(
        DeadLettersMeasured(
            schema="inbox",
            groups=(
                DeadLetterGroup("consumer:billing", Status.PENDING, 3, 60.0),
                DeadLetterGroup("consumer:billing", Status.DISCARDED, 5, 900.0),
            ),
        )
    )
    total = "dead_letter_total"
    assert value(metrics.registry, total, status="PENDING", **origin) == 3
    assert value(metrics.registry, total, status="DISCARDED", **origin) == 5
    assert value(metrics.registry, "dead_letter_age_seconds", **origin) == 60

    metrics(DeadLettersMeasured(schema="inbox", groups=()))
    assert value(metrics.registry, total, status="PENDING", **origin) is None
    assert value(metrics.registry, "dead_letter_age_seconds", **origin) is None


def test_metrics_are_served_where_it_is_asked_for() -> None:
    assert serve_metrics(argparse.Namespace(metrics_listen=None)) is None
    metrics = PrometheusEvents()
    metrics(BatchSettled(published=1, retried=0, dead_lettered=0, seconds=0.1))
    server = metrics.serve(ListenAddress("127.0.0.1", 0))
    with urllib.request.urlopen(f"http://{server.address}/metrics") as answer:
        said = answer.read().decode()
    server.close()
    assert 'pillarbox_events_total{consumer="",event="BatchSettled"} 1.0' in said


@pytest.mark.parametrize(
    ("address", "interval", "problem"),
    [
        ("70000", 60.0, "metrics-listen=70000: port 70000 is above 65535; choose"),
        ("here:", 60.0, "metrics-listen=here:: not an address; write one of 8080"),
        ("0", 0.0, "metrics-interval=0"),
    ],
)
def test_what_can_not_be_served_is_refused(
    address: str, interval: float, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        serve_metrics(
            argparse.Namespace(metrics_listen=address, metrics_interval=interval)
        )
