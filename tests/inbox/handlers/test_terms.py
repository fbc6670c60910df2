"""A consumer's handlers receive versions they understand, within a time limit."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from inbox.events import HandlerFailed, MessageDeadLettered, MessageHandled
from inbox.sources.memory import MemorySource
from outbox.dead_letters.retry import RetryCounts
from outbox.errors import ConfigError
from pillarbox import Consumer, Message, SchemaRegistry
from tests.fixtures.consumers import QUICK, consuming, running, sessions_of
from tests.fixtures.dead_letters import retry
from tests.fixtures.effects import EFFECT, effects
from tests.fixtures.sessions import execute

TOPIC = "orders.placed"


def dead_letters(url: str) -> list[Any]:
    query = (
        "SELECT schema_version, attempts, error_reason, payload FROM inbox.dead_letter"
    )
    return execute(url, query)


def currency(session: Session, message: Message) -> None:
    session.execute(EFFECT, {"what": message.json()["currency"]})


def with_currency(message: Message) -> object:
    return {**message.json(), "currency": "EUR"}


async def test_old_versions_are_upcast_and_newer_ones_are_dead_lettered(
    url: str,
) -> None:
    old = Message(TOPIC, {"order_id": 1})
    new = Message(TOPIC, {"order_id": 2, "currency": "CHF"}, schema_version=2)
    newer = Message(TOPIC, {"order_id": 3, "money": {}}, schema_version=3)
    source, terms = MemorySource(old, new, newer), {"version": 2}
    async with consuming(url, source, currency, terms, upcast=with_currency) as events:
        await events.wait_for(MessageHandled, 2)
        await events.wait_for(MessageDeadLettered)

    assert effects(url) == ["CHF", "EUR"]
    ((version, _, reason, payload),) = dead_letters(url)
    assert "schema_version 3 is newer than 2" in reason
    assert (version, bytes(payload)) == (3, newer.payload)


async def test_an_upgraded_consumer_handles_dead_letters_of_its_new_version(
    url: str,
) -> None:
    newer = Message(TOPIC, {"money": {"currency": "CHF"}}, schema_version=3)

    def currency_of_money(session: Session, message: Message) -> None:
        session.execute(EFFECT, {"what": message.json()["money"]["currency"]})

    with sessions_of(url) as sessions:
        before = Consumer(MemorySource(newer), sessions, name="billing")
        before.handles(TOPIC, version=2)(currency)
        before.upcasts(TOPIC, to=2)(with_currency)
        async with running(before) as events:
            await events.wait_for(MessageDeadLettered)
        assert await retry(before.retrier()) == RetryCounts(failed=1)
        assert effects(url) == []

        after = Consumer(MemorySource(), sessions, name="billing")
        after.handles(TOPIC, version=3)(currency_of_money)
        for version in (2, 3):
            after.upcasts(TOPIC, to=version)(with_currency)
        assert await retry(after.retrier()) == RetryCounts(succeeded=1)
    assert effects(url) == ["CHF"]
    assert execute(url, "SELECT status FROM inbox.dead_letter") == [("SUCCEEDED",)]


async def test_a_message_that_violates_its_schema_reaches_no_handler(url: str) -> None:
    registry = SchemaRegistry()
    registry.register(TOPIC, {"required": ["currency"]})
    messages = [Message(TOPIC, {"currency": "CHF"}), Message(TOPIC, {"order_id": 1})]
    source = MemorySource(*messages)
    async with consuming(url, source, currency, registry=registry) as events:
        await events.wait_for(MessageHandled)
        await events.wait_for(MessageDeadLettered)
    assert events.of(HandlerFailed) == []
    assert effects(url) == ["CHF"]
    ((_, _, reason, _),) = dead_letters(url)
    assert "breaks required" in reason


async def test_a_handler_that_times_out_leaves_no_effects(url: str) -> None:
    async def endless(session: AsyncSession, message: Message) -> None:
        await session.execute(EFFECT, {"what": "begun"})
        await asyncio.Event().wait()

    source = MemorySource(Message(TOPIC, {}))
    terms = {"time_limit": timedelta(milliseconds=50)}
    async with consuming(url, source, endless, terms, retry=QUICK) as events:
        await events.wait_for(MessageDeadLettered)

    assert effects(url) == []
    ((_, attempts, reason, _),) = dead_letters(url)
    assert attempts == QUICK.max_attempts
    assert "took longer than its time limit of 0.05s" in reason


async def test_a_gap_between_versions_is_reported_at_start(url: str) -> None:
    with sessions_of(url) as sessions:
        consumer = Consumer(MemorySource(), sessions, name="billing")
        consumer.handles(TOPIC, version=4)(currency)
        consumer.upcasts(TOPIC, to=2)(with_currency)

        with pytest.raises(ConfigError, match="upcaster to version 3 is missing"):
            await consumer.run()
