"""Batch handlers: one transaction, and one statement for all receipts."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker

from pillarbox import Consumer, DeadLetter, Message
from pillarbox.inbox.events import (
    ConsumerStopped,
    DuplicateSkipped,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
)
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.lane import Priority
from tests.fixtures.consumers import (
    QUICK,
    consuming,
    numbered,
    recorded_statements,
    running,
    sessions_of,
)
from tests.fixtures.effects import EFFECT, effects, receipts
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import answer_after


def rows_of(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"what": message.payload.decode()} for message in messages]


def names(count: int) -> list[str]:
    return sorted(str(n) for n in range(count))


def insert(session: Session, messages: Sequence[Message]) -> None:
    session.execute(EFFECT, rows_of(messages))


@pytest.mark.parametrize("driver", ["psycopg async", "asyncpg"])
async def test_many_messages_are_handled_in_few_transactions(
    driver: str, url: str
) -> None:
    sizes: list[int] = []

    async def handle(session: AsyncSession, messages: Sequence[Message]) -> None:
        sizes.append(len(messages))
        await session.run_sync(insert, messages)

    source, terms = MemorySource(*numbered(100, keys=100)), {"batch": 20}
    async with consuming(url, source, handle, terms, driver=driver) as events:
        await events.wait_for(MessageHandled, 100)

    assert effects(url) == names(100)
    assert receipts(url) == 100
    assert max(sizes) == 20
    assert len(sizes) < 20


async def test_all_receipts_of_a_batch_are_one_statement(url: str) -> None:
    source = MemorySource(*numbered(50, keys=50))
    with sessions_of(url) as sessions, recorded_statements(sessions) as seen:
        consumer = Consumer(source, sessions, name="billing")
        consumer.handles_batch("*", max_size=50)(insert)
        async with running(consumer) as events:
            await events.wait_for(MessageHandled, 50)
    assert receipts(url) == 50
    inserts = [said for said in seen if "INSERT" in said and "inbox.receipt" in said]
    assert len(inserts) <= 3


async def test_duplicates_are_left_out_of_a_batch(url: str) -> None:
    messages = numbered(10, keys=10)
    for known, new in ((0, 4), (4, 6)):
        source = MemorySource(*messages[: known + new])
        async with consuming(url, source, insert, {"batch": 10}) as events:
            await events.wait_for(MessageHandled, new)
            await events.wait_for(DuplicateSkipped, known)
    assert effects(url) == names(10)


async def test_a_bad_message_fails_alone(url: str) -> None:
    def handle(session: Session, messages: Sequence[Message]) -> None:
        insert(session, messages)
        for message in messages:
            if message.payload == b"7":
                raise ValueError("seven")
            if message.payload == b"8":
                raise KeyError("eight")
            if message.payload == b"9":
                raise DeadLetter("nine")

    source = MemorySource(*numbered(20, keys=20))
    terms = {"batch": 20, "permanent": KeyError}
    settings: dict[str, Any] = {"retry": QUICK, "redact": str}
    async with consuming(url, source, handle, terms, **settings) as events:
        await events.wait_for(MessageHandled, 17)
        await events.wait_for(MessageDeadLettered, 3)
    assert len(events.of(HandlerFailed)) == 2
    assert effects(url) == [name for name in names(20) if name not in "789"]
    assert receipts(url) >= 17
    rows = execute(url, "SELECT payload, error_reason FROM inbox.dead_letter")
    reasons = {bytes(payload): reason for payload, reason in rows}
    assert "seven" in reasons[b"7"]
    assert "KeyError: raised in " in reasons[b"8"]
    assert "nine" in reasons[b"9"]


async def test_an_urgent_message_is_in_the_next_batch(url: str) -> None:
    bulk = [m.replace(priority=Priority.BULK) for m in numbered(40, keys=40)]
    urgent = Message("orders", b"urgent", priority=Priority.REALTIME)
    source = MemorySource(*bulk)
    may_go_on = asyncio.Event()
    batches: list[Sequence[Message]] = []

    async def handle(_: AsyncSession, messages: Sequence[Message]) -> None:
        batches.append(messages)
        await may_go_on.wait()

    async with consuming(url, source, handle, {"batch": 5}) as events:
        while len(source.held) < len(bulk) or not batches:
            await answer_after(0.01)
        source.add(urgent)
        while len(source.held) <= len(bulk):
            await answer_after(0.01)
        may_go_on.set()
        await events.wait_for(MessageHandled, len(bulk) + 1)
    assert urgent in batches[1]


async def test_a_stop_that_times_out_rolls_back_the_whole_batch(url: str) -> None:
    begun = asyncio.Event()

    async def handle(session: AsyncSession, messages: Sequence[Message]) -> None:
        await session.run_sync(insert, messages)
        begun.set()
        await asyncio.Event().wait()

    source, terms = MemorySource(*numbered(5, keys=5)), {"batch": 5}
    drain = timedelta(milliseconds=50)
    async with consuming(url, source, handle, terms, drain=drain) as events:
        await begun.wait()
    (stopped,) = events.of(ConsumerStopped)
    assert stopped.returned == 5
    assert effects(url) == []
    assert receipts(url) == 0


def test_a_batch_of_one_message_is_refused() -> None:
    consumer = Consumer(MemorySource(), sessionmaker(), name="billing")
    with pytest.raises(ConfigError, match="max_size=1: must be at least 2"):
        consumer.handles_batch("orders", max_size=1)(print)
