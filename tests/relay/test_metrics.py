"""A relay's metrics and counts, on a real database."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from prometheus_client import CollectorRegistry

from pillarbox import Message
from pillarbox.outbox.events import Observer, ProcessMeasured
from pillarbox.outbox.observability.prometheus import OTHER, TopicLabels
from pillarbox.outbox.postgres.connection import conninfo
from pillarbox.outbox.testing.events import RecordedEvents
from pillarbox.relay.activity import RelayCounts
from pillarbox.relay.events import (
    BatchPublished,
    BatchSettled,
    BrokerLost,
    BrokerRecovered,
    MessageDeadLettered,
    RelayStopped,
)
from pillarbox.relay.metrics import RelayMetrics
from pillarbox.relay.publisher import Acked, Nacked
from pillarbox.relay.relay import Relay
from pillarbox.relay.replay import ReplayCriteria, replay_published
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import QUICK, insert
from tests.fixtures.sessions import execute

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
pytestmark = pytest.mark.usefixtures("measured_often")


@pytest.fixture
def measured_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relays report their measures several times a second."""
    monkeypatch.setattr("pillarbox.outbox.observability.presence._REPORT", 0.1)


class Observed:
    """A relay's events, metrics and counts."""

    def __init__(self, topics: int = 100) -> None:
        self.events = RecordedEvents()
        self.counts = RelayCounts()
        self.registry = CollectorRegistry()
        self.metrics = RelayMetrics(self.registry, TopicLabels(topics), self.counts)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"pillarbox_relay_{name}", labels)


@asynccontextmanager
async def running(
    url: str, publisher: ScriptedPublisher, topics: int = 100
) -> AsyncIterator[Observed]:
    seen = Observed(topics)
    observers: list[Observer] = [seen.metrics, seen.counts, seen.events]
    relay = Relay(url, publisher, QUICK, observers=observers)
    task = asyncio.create_task(relay.run())
    try:
        yield seen
    finally:
        relay.stop()
        await task


async def test_published_messages_are_counted_and_timed(database_url: str) -> None:
    insert(database_url, *[Message("orders", b"1") for _ in range(3)])
    insert(database_url, Message("payments", b"1"))
    async with running(database_url, ScriptedPublisher()) as seen:
        while sum(e.published for e in seen.events.of(BatchSettled)) < 4:
            await seen.events.wait_for(
                BatchSettled, len(seen.events.of(BatchSettled)) + 1
            )
        assert seen.value("messages_published_total", topic="orders") == 3
        assert seen.value("messages_published_total", topic="payments") == 1
        assert seen.value("messages_refused_total", topic="payments") == 0
        assert seen.value("messages_dead_lettered_total", topic="payments") == 0
        assert seen.value("add_to_publish_seconds_count") == 4
        waited = seen.value("add_to_publish_seconds_sum")
        assert waited is not None
        assert 0 <= waited < 4 * 300
        for name in ("claim", "publish", "settle"):
            count = seen.value(f"{name}_duration_seconds_count")
            assert count is not None
            assert count >= 1
        while not seen.value("lanes"):
            count = len(seen.events.of(ProcessMeasured))
            await seen.events.wait_for(ProcessMeasured, count + 1)
        lanes = seen.value("lanes")
        active = seen.counts.take(MINUTE)
        assert (active.published, active.refused, active.dead_lettered) == (4, 0, 0)
        assert active.lanes == lanes
        assert active.lag is not None
        assert active.slowest is not None
        assert 0 <= active.lag <= active.slowest < 300
        assert not seen.counts.is_active
        assert seen.counts.take(MINUTE).lag is None
    await seen.events.wait_for(RelayStopped)
    assert seen.value("lanes") == 0


async def test_refusals_dead_letters_and_blocked_keys_are_counted(
    database_url: str,
) -> None:
    answers = {"bad": Nacked("no"), "later": Nacked("later", retry_after=HOUR)}
    insert(database_url, Message("bad", b"1", key="k"), Message("bad", b"1"))
    insert(database_url, *[Message("later", b"1", key=f"k{n}") for n in range(3)])
    publisher = ScriptedPublisher(lambda message: answers[message.topic])
    async with running(database_url, publisher) as seen:
        await seen.events.wait_for(MessageDeadLettered, 2)
        attempts = QUICK.retry.max_attempts
        assert seen.value("messages_refused_total", topic="bad") == 2 * (attempts - 1)
        assert seen.value("messages_dead_lettered_total", topic="bad") == 2
        assert seen.value("messages_published_total", topic="bad") == 0
        assert seen.counts.is_active
        # The keys of the other messages wait for their retries.
        measured = 1
        while seen.value("blocked_keys") != 3:
            await seen.events.wait_for(ProcessMeasured, measured)
            measured += 1
        active = seen.counts.take(MINUTE)
        refused = 2 * (attempts - 1) + 3
        assert (active.refused, active.dead_lettered) == (refused, 2)
        assert active.blocked_keys == 3


async def test_the_breaker_is_open_while_the_broker_is_unavailable(
    database_url: str,
) -> None:
    insert(database_url, Message("t", b"1"))
    publisher = ScriptedPublisher()
    async with running(database_url, publisher) as seen:
        assert seen.value("breaker_open") == 0
        await seen.events.wait_for(BatchSettled)
        publisher.away = "it is down"
        insert(database_url, Message("t", b"2"))
        await seen.events.wait_for(BrokerLost)
        assert seen.value("breaker_open") == 1
        publisher.away = None
        await seen.events.wait_for(BrokerRecovered)
        assert seen.value("breaker_open") == 0


async def test_topics_beyond_the_limit_are_counted_as_other(
    database_url: str,
) -> None:
    insert(database_url, *[Message(f"t{n}", b"1") for n in range(6)])
    publisher = ScriptedPublisher()
    async with running(database_url, publisher, topics=2) as seen:
        await publisher.until_acked(6)
        while sum(e.acked for e in seen.events.of(BatchPublished)) < 6:
            await seen.events.wait_for(
                BatchPublished, len(seen.events.of(BatchPublished)) + 1
            )
        assert seen.value("messages_published_total", topic=OTHER) == 4


DUE = "SELECT available_at FROM outbox.message WHERE available_at IS NOT NULL"
CREATED = "SELECT created_at FROM outbox.message"
REPLAYED = "SELECT due_at FROM outbox.deferral WHERE cause = 'replayed'"


def timestamps(url: str, query: str) -> list[datetime]:
    """Run a query for timestamps, and return them in UTC.

    In an hour that the server's time zone repeats, timestamps in that zone never equal
    those of another zone.
    """
    return [at.astimezone(UTC) for (at,) in execute(url, query)]


def due_at(seen: Observed) -> list[datetime]:
    return [at for event in seen.events.of(BatchPublished) for at in event.due_at]


async def test_messages_are_timed_from_when_they_were_added_or_due(
    database_url: str,
) -> None:
    insert(database_url, Message("t", b"1", key="k"), Message("t", b"2"))
    publisher = ScriptedPublisher(
        lambda _: Nacked("not now") if len(publisher.calls) < 3 else Acked()
    )
    async with running(database_url, publisher) as seen:
        await publisher.until_acked(2)
        # The order of the retries is random.
        assert {*due_at(seen)} == {*timestamps(database_url, CREATED)}

    insert(database_url, Message("while no relay ran", b"1"), Message("soon", b"2"))
    execute(
        database_url,
        "UPDATE outbox.message SET available_at = CASE topic WHEN 'soon'"
        " THEN clock_timestamp() + interval '1 s'"
        " ELSE created_at + interval '1 microsecond' END"
        " WHERE topic IN ('soon', 'while no relay ran')",
    )
    publisher = ScriptedPublisher()
    async with running(database_url, publisher) as seen:
        await publisher.until_acked(2)
    due = {*timestamps(database_url, DUE)}
    assert {*due_at(seen)} == due
    assert {it.available_at for call in publisher.calls for it in call} == due
    assert seen.counts.take(MINUTE).lag is not None


async def test_a_replayed_message_is_timed_from_the_replay(database_url: str) -> None:
    insert(database_url, Message("t", b"1"))
    publisher = ScriptedPublisher()
    async with running(database_url, publisher) as seen:
        await seen.events.wait_for(BatchSettled)
        now = datetime.now(UTC)
        choice = ReplayCriteria(
            since=now - timedelta(hours=1), until=now + timedelta(hours=1)
        )
        with psycopg.connect(conninfo(database_url), autocommit=True) as connection:
            assert replay_published(connection, choice) == 1
        await publisher.until_acked(2)
    (replayed,) = timestamps(database_url, REPLAYED)
    (created,) = timestamps(database_url, CREATED)
    assert due_at(seen) == [created, replayed]


def test_a_database_whose_clock_is_ahead_makes_no_duration_negative() -> None:
    seen = Observed()
    ahead = datetime.now(UTC) + timedelta(hours=1)
    event = BatchPublished(
        messages=1, acked=1, seconds=0.1, topics=["t"], due_at=[ahead]
    )
    seen.metrics(event)
    seen.counts(event)
    assert seen.value("add_to_publish_seconds_sum") == 0
    assert seen.value("add_to_publish_seconds_bucket", le="0.005") == 1
    assert seen.counts.take(MINUTE).lag == 0
