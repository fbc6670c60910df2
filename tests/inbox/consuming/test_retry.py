"""Any kind of handler can have its own retry policy."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from inbox.events import HandlerFailed, MessageDeadLettered
from inbox.jobs.job import AsyncJob
from inbox.sources.memory import MemorySource
from outbox.retry import RetryPolicy
from pillarbox import Consumer, DeadLetter, Message
from tests.fixtures.consumers import (
    QUICK,
    async_sessions_of,
    handles,
    running,
    sessions_of,
)

TWICE = RetryPolicy(
    max_attempts=2,
    first_delay=timedelta(milliseconds=20),
    max_delay=timedelta(milliseconds=20),
)


async def fail(session: AsyncSession, message: Message) -> None:
    raise ValueError("no")


async def fail_all(session: AsyncSession, messages: Sequence[Message]) -> None:
    raise ValueError("no")


async def fail_slowly(job: AsyncJob, message: Message) -> None:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("handler", "kind"),
    [
        (fail, {}),
        (fail_all, {"batch": 2}),
        (fail_slowly, {"lease": timedelta(seconds=30)}),
    ],
    ids=["ordinary", "batch", "long"],
)
async def test_a_handler_is_retried_by_its_own_policy(
    database_url: str, handler: Any, kind: dict[str, Any]
) -> None:
    source = MemorySource(Message("own", b""), Message("common", b""))
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(source, sessions, name="billing", retry=QUICK)
        handles(consumer, "own", retry=TWICE, **kind)(handler)
        handles(consumer, "common", **kind)(handler)
        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered, 2)

    attempts = {e.topic: e.attempts for e in events.of(MessageDeadLettered)}
    assert attempts == {"own": 2, "common": 3}
    waits = [
        e.seconds_until_retry for e in events.of(HandlerFailed) if e.topic == "own"
    ]
    assert waits == [0.02]
    waits = [
        e.seconds_until_retry for e in events.of(HandlerFailed) if e.topic == "common"
    ]
    assert len(waits) == 2
    assert max(waits) <= 0.005


async def test_a_message_that_used_up_the_starts_of_its_policy_is_dead_lettered(
    database_url: str,
) -> None:
    source = MemorySource()
    called: list[Message] = []

    async def note(session: AsyncSession, message: Message) -> None:
        called.append(message)

    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(source, sessions, name="billing", retry=QUICK)
        consumer.handles("own", retry=TWICE)(note)
        source.return_now(Message("own", b""), 2)
        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered)
    (given_up,) = events.of(MessageDeadLettered)
    assert given_up.reason == "was started 2 times and never finished"
    assert called == []


async def test_a_failing_handlers_stack_trace_is_logged_once_per_message(
    database_url: str,
) -> None:
    def handle(session: Session, message: Message) -> None:
        raise ValueError(f"no customer of hunter2, attempt of {message.topic}")

    with sessions_of(database_url) as sessions:
        messages = [Message("a", b""), Message("b", b"")]
        consumer = Consumer(
            MemorySource(*messages),
            sessions,
            name="billing",
            retry=QUICK,
            redact=lambda said: said.replace("hunter2", "…"),
        )
        consumer.handles("*")(handle)
        async with running(consumer) as events:
            given_up = await events.wait_for(MessageDeadLettered, 2)
            failed = await events.wait_for(HandlerFailed, 4)

    for message in messages:
        first, second = [one for one in failed if one.id == message.id]
        assert first.stacktrace is not None
        assert 'raise ValueError(f"no customer' in first.stacktrace
        assert f"ValueError: no customer of …, attempt of {message.topic}" in (
            first.stacktrace
        )
        assert second.stacktrace is None
        assert second.attempts == 2
    assert [one.stacktrace for one in given_up] == [None, None]


async def test_the_event_of_a_dead_letter_at_the_first_attempt_has_its_stack_trace(
    database_url: str,
) -> None:
    def handle(session: Session, message: Message) -> None:
        if message.topic == "decided":
            raise DeadLetter("a test order")
        raise KeyError("currency")

    with sessions_of(database_url) as sessions:
        source = MemorySource(Message("decided", b""), Message("failed", b""))
        consumer = Consumer(source, sessions, name="billing")
        consumer.handles("*", permanent=KeyError)(handle)
        async with running(consumer) as events:
            given_up = await events.wait_for(MessageDeadLettered, 2)

    traces = {one.topic: one.stacktrace for one in given_up}
    assert traces["decided"] is None
    assert 'raise KeyError("currency")' in (traces["failed"] or "")
