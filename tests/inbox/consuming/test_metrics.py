"""A consumer's metrics and counts, on a real database."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from pillarbox import Consumer, DeadLetter, Message, RetryLater
from pillarbox.inbox.consuming.activity import ConsumerCounts
from pillarbox.inbox.consuming.metrics import ConsumerMetrics
from pillarbox.inbox.events import (
    ConsumerStopped,
    DuplicateSkipped,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.inbox.sources.postgres import PostgresSource
from pillarbox.outbox.events import ProcessMeasured
from pillarbox.outbox.observability.prometheus import TopicLabels
from tests.fixtures.consumers import QUICK, async_sessions_of, id_of, running
from tests.fixtures.relay import insert

MINUTE = timedelta(minutes=1)


class Observed:
    """A consumer's metrics and counts."""

    def __init__(self, consumer: Consumer | None = None) -> None:
        self.registry = CollectorRegistry()
        self.counts = ConsumerCounts("billing")
        self.metrics = ConsumerMetrics(self.registry, TopicLabels(), self.counts)
        if consumer is not None:
            consumer.observe(self.metrics)
            consumer.observe(self.counts)

    def __call__(self, event: Any) -> None:
        self.metrics(event)
        self.counts(event)

    def value(self, name: str, **labels: str) -> float | None:
        labels["consumer"] = "billing"
        return self.registry.get_sample_value(f"pillarbox_consumer_{name}", labels)

    def messages(self, outcome: str, topic: str = "orders") -> float | None:
        return self.value(f"messages_{outcome}_total", topic=topic)


async def test_every_outcome_is_counted_by_consumer_and_topic(
    database_url: str,
) -> None:
    good = Message("orders", b"good")
    source = MemorySource(
        good,
        good,
        Message("orders", b"bad"),
        Message("orders", b"fail"),
        Message("orders", b"later"),
        Message("payments", b"good"),
    )
    postponed = set()
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(source, sessions, name="billing", retry=QUICK)
        seen = Observed(consumer)

        @consumer.handles("orders")
        @consumer.handles("payments")
        async def handle(session: AsyncSession, message: Message) -> None:
            await session.execute(text("SELECT 1"))
            if message.payload == b"bad":
                raise DeadLetter("it is bad")
            if message.payload == b"fail":
                raise ValueError("no")
            if message.payload == b"later" and message.id not in postponed:
                postponed.add(message.id)
                raise RetryLater(timedelta(milliseconds=1))

        async with running(consumer) as events:
            assert seen.messages("dead_lettered", "payments") is not None
            await events.wait_for(MessageHandled, 3)
            await events.wait_for(DuplicateSkipped)
            await events.wait_for(MessageDeadLettered, 2)
        failures = len(events.of(HandlerFailed))
        assert failures == QUICK.max_attempts - 1
        assert len(events.of(RetryRequested)) == 1
        assert seen.messages("handled") == 2
        assert seen.messages("handled", "payments") == 1
        assert seen.messages("duplicate") == 1
        assert seen.messages("failed") == failures
        assert seen.messages("retried") == failures + 1
        assert seen.messages("dead_lettered") == 2
        active = seen.counts.take(MINUTE)
        counted = (active.handled, active.duplicates, active.failed, active.retried)
        assert counted == (3, 1, failures, failures + 1)
        assert active.dead_lettered == 2
        assert not seen.counts.is_active


async def test_handlers_and_the_delivery_of_a_message_are_timed(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pillarbox.outbox.observability.presence._REPORT", 0.1)
    source = PostgresSource(database_url, consumer="billing", topics=["orders"])
    entered, leave = asyncio.Event(), asyncio.Event()
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(source, sessions, name="billing", retry=QUICK)
        seen = Observed(consumer)

        @consumer.handles("orders")
        async def handle(session: AsyncSession, message: Message) -> None:
            await session.execute(text("SELECT 1"))
            entered.set()
            await leave.wait()

        async with running(consumer) as events:
            insert(database_url, Message("orders", b"1"))
            await entered.wait()
            started = len(events.of(ProcessMeasured))
            await events.wait_for(ProcessMeasured, started + 1)
            assert seen.value("in_flight_messages") == 1
            assert seen.value("held_messages") == 1
            leave.set()
            await events.wait_for(MessageHandled)
        await events.wait_for(ConsumerStopped)
    assert seen.value("in_flight_messages") == seen.value("held_messages") == 0
    handler = "handler_duration_seconds"
    assert seen.value(f"{handler}_count", topic="orders") == 1
    assert seen.value("publish_to_handle_seconds_count") == 1
    assert seen.value("add_to_handled_seconds_count") == 1
    handled = seen.value(f"{handler}_sum", topic="orders")
    waited = seen.value("publish_to_handle_seconds_sum")
    total = seen.value("add_to_handled_seconds_sum")
    assert handled is not None
    assert waited is not None
    assert total is not None
    assert 0 < handled < 300
    assert 0 <= waited < 300
    # An id contains its creation time in milliseconds.
    assert total >= handled - 0.002


def handled(message: Message, *, published_at: float | None) -> MessageHandled:
    return MessageHandled(
        consumer="billing",
        id=message.id,
        topic=message.topic,
        key=None,
        seconds=0.5,
        published_at=published_at,
        due_at=published_at,
    )


def test_clock_skew_makes_no_duration_negative() -> None:
    seen = Observed()
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    ahead = Message("t", b"1", id=id_of(tomorrow))
    seen(handled(ahead, published_at=tomorrow.timestamp()))
    assert seen.value("publish_to_handle_seconds_sum") == 0
    assert seen.value("add_to_handled_seconds_sum") == 0
    assert seen.counts.take(MINUTE).lag == 0


def test_blocked_keys_are_exported_and_their_age_only_while_there_are_some() -> None:
    seen = Observed()
    for keys, age in ((2, timedelta(seconds=90)), (0, None)):
        seen(
            ProcessMeasured(
                kind="consumer",
                name="billing",
                in_flight=0,
                held=0,
                blocked_keys=keys,
                blocked_for=age,
            )
        )
        assert seen.value("blocked_keys") == keys
        expected = age and age.total_seconds()
        assert seen.value("blocked_key_age_seconds") == expected
