"""Relay and consumer compare their retries with the retention in the database."""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeAlias

import pytest

from inbox.sources.memory import MemorySource
from outbox.postgres.late_messages import KEPT_FOR_LATE_MESSAGES, RetentionTooShort
from outbox.retry import RetryPolicy
from outbox.testing.events import RecordedEvents
from pillarbox import Consumer
from tests.fixtures.consumers import async_sessions_of, sessions_of
from tests.fixtures.consumers import running as consuming
from tests.fixtures.pasting import paste
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import running as relaying

EventsOf: TypeAlias = Callable[[str, RetryPolicy], Awaitable[RecordedEvents]]

PATIENT = RetryPolicy(max_attempts=100, max_delay=timedelta(hours=2))
AFTER = timedelta(days=6, hours=200, minutes=40)


async def events_of_relay(url: str, retry: RetryPolicy) -> RecordedEvents:
    async with relaying(url, ScriptedPublisher(), retry=retry) as relay:
        return relay.events


async def events_of_sync_consumer(url: str, retry: RetryPolicy) -> RecordedEvents:
    with sessions_of(url) as sessions:
        consumer = Consumer(MemorySource(), sessions, name="billing", retry=retry)
        consumer.handles("orders")(lambda _session, _message: None)
        async with consuming(consumer) as events:
            return events


async def events_of_async_consumer(url: str, retry: RetryPolicy) -> RecordedEvents:
    async def handle(_session: object, _message: object) -> None: ...

    async with async_sessions_of(url, "asyncpg") as sessions:
        consumer = Consumer(MemorySource(), sessions, name="billing", retry=retry)
        consumer.handles("orders")(handle)
        async with consuming(consumer) as events:
            return events


@pytest.mark.parametrize(
    "events_of",
    [events_of_relay, events_of_sync_consumer, events_of_async_consumer],
    ids=lambda f: f.__name__,
)
async def test_retries_that_outlast_the_receipts_are_reported_until_retention_is_raised(
    database_url: str, events_of: EventsOf
) -> None:
    found = (await events_of(database_url, PATIENT)).of(RetentionTooShort)

    assert sorted(event.table for event in found) == sorted(KEPT_FOR_LATE_MESSAGES)
    assert {event.needed for event in found} == {AFTER}
    for event in found:
        paste(database_url, event.remedy)
    again = await events_of(database_url, PATIENT)
    assert not again.of(RetentionTooShort)


async def test_default_retries_do_not_warn_about_receipts(database_url: str) -> None:
    events = await events_of_relay(database_url, RetryPolicy())
    assert not events.of(RetentionTooShort)
