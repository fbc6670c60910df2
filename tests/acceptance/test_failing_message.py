"""A poison message among thousands delays only its own key, on either side."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from inbox.events import HandlerFailed, MessageHandled
from outbox.retry import RetryPolicy
from outbox.testing.events import RecordedEvents
from pillarbox import Consumer, Message
from relay.events import BatchSettled, MessageRefused
from relay.publisher import Acked, Confirmation, Nacked
from relay.publishers.postgres import PostgresPublisher
from tests.fixtures.consumers import NEVER, async_sessions_of, running
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import insert, unsettled
from tests.fixtures.relay import running as running_relay
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

KEYS = 20
POISON = b"poison"
HOUR = timedelta(hours=1)


@pytest.fixture
def count(full: bool) -> int:
    return 3_000 if full else 100


def messages_with_poison(count: int) -> Sequence[Message]:
    """Return messages with one early poison message; all keys have as many messages."""
    return [
        Message("orders", POISON if n == KEYS else b"%d" % n, key=f"key {n % KEYS}")
        for n in range(count)
    ]


def published(events: RecordedEvents) -> int:
    """Return how many messages the relay reported as published."""
    return sum(batch.published for batch in events.of(BatchSettled))


@pytest.mark.fault
@pytest.mark.timeout(300)
async def test_a_poison_message_holds_back_its_key_in_a_consumer(
    database_url: str, count: int
) -> None:
    execute(database_url, "CREATE TABLE effect (what text)")
    execute(database_url, "INSERT INTO inbox.subscription VALUES ('billing', 'orders')")
    async with PostgresPublisher(database_url) as publisher:
        await publisher.publish(messages_with_poison(count))
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(database_url, sessions, name="billing", retry=NEVER)

        @consumer.handles("orders")
        async def handle(session: AsyncSession, message: Message) -> None:
            if message.payload == POISON:
                raise ValueError("poison")
            await session.execute(
                text("INSERT INTO effect VALUES (:what)"),
                {"what": message.payload.decode()},
            )

        of_its_key = count // KEYS
        async with running(consumer) as events:
            # All others are handled while the poison message waits for its retry.
            others = count - of_its_key + 1
            await events.wait_for(MessageHandled, others, timeout=240)
            await events.wait_for(HandlerFailed, timeout=60)
        assert len(events.of(MessageHandled)) == others
        assert len(events.of(HandlerFailed)) == 1
    effects = {int(what) for (what,) in execute(database_url, "TABLE effect")}
    assert effects == {n for n in range(count) if n % KEYS or n < KEYS}


@pytest.mark.fault
@pytest.mark.timeout(300)
async def test_a_poison_message_holds_back_its_key_in_a_relay(
    database_url: str, count: int
) -> None:
    def refuse_poison(message: Message) -> Confirmation:
        return Nacked("poison") if message.payload == POISON else Acked()

    insert(database_url, *messages_with_poison(count))
    publisher = ScriptedPublisher(refuse_poison)
    retry = RetryPolicy(first_delay=HOUR, max_delay=HOUR)
    left = count // KEYS - 1  # the poison message and those waiting behind it
    async with running_relay(database_url, publisher, retry=retry) as relay:
        await asyncio.to_thread(
            wait_for,
            "all others are published, and told",
            lambda: published(relay.events) == count - left,
            seconds=240,
        )
        assert unsettled(database_url) == left
        assert len(relay.events.of(MessageRefused)) == 1
