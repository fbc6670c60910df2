"""Batch handlers: one transaction, and one statement for all receipts."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from inbox.events import (
    ConsumerStopped,
    DuplicateSkipped,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
)
from inbox.sources.memory import MemorySource
from outbox.errors import ConfigError
from pillarbox import Consumer, DeadLetter, Message
from tests.fixtures.consumers import (
    QUICK,
    async_sessions_of,
    numbered,
    running,
    sessions_of,
)
from tests.fixtures.sessions import execute

EFFECT = text("INSERT INTO effect (what) VALUES (:what)")


@pytest.fixture
def url(database_url: str) -> str:
    execute(database_url, "CREATE TABLE effect (what text)")
    return database_url


def effects(url: str) -> list[str]:
    return [what for (what,) in execute(url, "SELECT what FROM effect ORDER BY what")]


def receipts(url: str) -> int:
    ((count,),) = execute(url, "SELECT count(*) FROM inbox.receipt")
    return int(count)


def rows_of(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"what": message.payload.decode()} for message in messages]


def names(count: int) -> list[str]:
    return sorted(str(n) for n in range(count))


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_many_messages_are_handled_in_few_transactions(
    driver: str, url: str
) -> None:
    sizes: list[int] = []
    async with async_sessions_of(url, driver) as sessions:
        consumer = Consumer(
            MemorySource(*numbered(100, keys=100)), sessions, name="billing"
        )

        @consumer.handles_batch("*", max_size=20)
        async def handle(session: AsyncSession, messages: Sequence[Message]) -> None:
            sizes.append(len(messages))
            await session.execute(EFFECT, rows_of(messages))

        async with running(consumer) as events:
            await events.wait_for(MessageHandled, 100)

    assert effects(url) == names(100)
    assert receipts(url) == 100
    assert max(sizes) == 20
    assert len(sizes) < 20


async def test_all_receipts_of_a_batch_are_one_statement(url: str) -> None:
    statements: list[str] = []
    with sessions_of(url) as sessions:
        engine = sessions.kw["bind"]
        consumer = Consumer(
            MemorySource(*numbered(50, keys=50)), sessions, name="billing"
        )

        @consumer.handles_batch("*", max_size=50)
        def handle(session: Session, messages: Sequence[Message]) -> None:
            session.execute(EFFECT, rows_of(messages))

        @event.listens_for(engine, "before_cursor_execute")
        def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            if "inbox.receipt" in statement and "INSERT" in statement:
                statements.append(statement)

        async with running(consumer) as events:
            await events.wait_for(MessageHandled, 50)
    assert receipts(url) == 50
    assert len(statements) <= 3


async def test_duplicates_are_left_out_of_a_batch(url: str) -> None:
    messages = numbered(10, keys=10)

    def handle(session: Session, messages: Sequence[Message]) -> None:
        session.execute(EFFECT, rows_of(messages))

    with sessions_of(url) as sessions:
        for known, new in ((0, 4), (4, 6)):
            source = MemorySource(*messages[: known + new])
            consumer = Consumer(source, sessions, name="billing")
            consumer.handles_batch("*", max_size=10)(handle)
            async with running(consumer) as events:
                await events.wait_for(MessageHandled, new)
                await events.wait_for(DuplicateSkipped, known)
    assert effects(url) == names(10)


async def test_a_bad_message_fails_alone(url: str) -> None:
    with sessions_of(url) as sessions:
        consumer = Consumer(
            MemorySource(*numbered(20, keys=20)), sessions, name="billing", retry=QUICK
        )

        @consumer.handles_batch("*", max_size=20, permanent=KeyError)
        def handle(session: Session, messages: Sequence[Message]) -> None:
            session.execute(EFFECT, rows_of(messages))
            for message in messages:
                if message.payload == b"7":
                    raise ValueError("seven")
                if message.payload == b"8":
                    raise KeyError("eight")
                if message.payload == b"9":
                    raise DeadLetter("nine")

        async with running(consumer) as events:
            await events.wait_for(MessageHandled, 17)
            await events.wait_for(MessageDeadLettered, 3)
            assert len(events.of(HandlerFailed)) == 2

    assert effects(url) == [name for name in names(20) if name not in "789"]
    assert receipts(url) >= 17
    rows = execute(url, "SELECT payload, error_reason FROM inbox.dead_letter")
    reasons = {bytes(payload): reason for payload, reason in rows}
    assert "seven" in reasons[b"7"]
    assert "eight" in reasons[b"8"]
    assert "nine" in reasons[b"9"]


async def test_a_stop_that_times_out_rolls_back_the_whole_batch(url: str) -> None:
    begun = asyncio.Event()
    async with async_sessions_of(url) as sessions:
        consumer = Consumer(
            MemorySource(*numbered(5, keys=5)),
            sessions,
            name="billing",
            drain=timedelta(milliseconds=50),
        )

        @consumer.handles_batch("*", max_size=5)
        async def handle(session: AsyncSession, messages: Sequence[Message]) -> None:
            await session.execute(EFFECT, rows_of(messages))
            begun.set()
            await asyncio.Event().wait()

        async with running(consumer) as events:
            await begun.wait()
        (stopped,) = events.of(ConsumerStopped)
    assert stopped.returned == 5
    assert effects(url) == []
    assert receipts(url) == 0


def test_a_batch_of_one_message_is_refused(database_url: str) -> None:
    with sessions_of(database_url) as sessions:
        consumer = Consumer(MemorySource(), sessions, name="billing")
        with pytest.raises(ConfigError, match="max_size=1: must be at least 2"):
            consumer.handles_batch("orders", max_size=1)(print)


async def test_a_handler_that_raises_cancelled_error_itself_has_failed(
    url: str,
) -> None:
    source = MemorySource(*numbered(8, keys=8))
    async with async_sessions_of(url) as sessions:
        consumer = Consumer(source, sessions, name="billing", retry=QUICK)

        @consumer.handles_batch("*", max_size=4)
        async def handle(session: AsyncSession, messages: Sequence[Message]) -> None:
            await session.execute(EFFECT, rows_of(messages))
            if any(message.payload == b"5" for message in messages):
                raise asyncio.CancelledError

        async with running(consumer) as events:
            await events.wait_for(MessageHandled, 7)
            await events.wait_for(MessageDeadLettered)
    assert effects(url) == sorted(set(names(8)) - {"5"})
    assert len(events.of(HandlerFailed)) == 2
    assert len(source.acked) == 8
