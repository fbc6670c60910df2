"""Events become metrics, whatever they are."""

import asyncio
import re
import urllib.request
from datetime import timedelta
from uuid import uuid4

import pytest
from prometheus_client import CollectorRegistry

from inbox.events import DuplicateSkipped, MessageHandled
from outbox.cli.supervisor import Watching
from outbox.dead_letters import Status
from outbox.dead_letters.events import DeadLetterGroup, DeadLettersMeasured
from outbox.errors import ConfigError
from outbox.observability.endpoints import Endpoints
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


def test_consumers_are_distinguished() -> None:
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


def test_dead_letter_metrics_show_the_last_measurement() -> None:
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


def watching(
    metrics_listen: str | None, interval: timedelta = timedelta(minutes=1)
) -> Watching:
    return Watching(metrics_listen=metrics_listen, metrics_interval=interval)


async def test_metrics_are_served_on_the_given_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "pillarbox")
    assert watching(None).metrics() is None
    metrics = PrometheusEvents()
    metrics(BatchSettled(published=1, retried=0, dead_lettered=0, seconds=0.1))
    endpoints = Endpoints()
    endpoints.add("metrics", "127.0.0.1:0", metrics)
    async with endpoints.served():
        (address,) = re.findall(r"metrics endpoint listening on (\S+)", caplog.text)
        url = f"http://{address}/metrics"
        answer = await asyncio.to_thread(urllib.request.urlopen, url, timeout=60)
        with answer:
            said = answer.read().decode()
    assert 'pillarbox_events_total{consumer="",event="BatchSettled"} 1.0' in said


def test_an_interval_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="metrics-interval=0s: must be above 0s"):
        watching("0", interval=timedelta(0)).metrics()


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("70000", "metrics-listen=70000: port 70000 is above 65535; choose"),
        ("here:", "metrics-listen=here:: not an address; write one of 8080"),
    ],
)
def test_an_invalid_address_is_refused(address: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Endpoints().add("metrics", address, PrometheusEvents())
