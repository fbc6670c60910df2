"""Any kind of handler can have its own retry policy."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pillarbox import Consumer, DeadLetter, Message
from pillarbox.inbox.events import HandlerFailed, MessageDeadLettered, MessageHandled
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.retry import RetryPolicy
from tests.fixtures.consumers import (
    QUICK,
    async_sessions_of,
    consuming,
    handles,
    running,
)
from tests.fixtures.sessions import execute

TWICE = RetryPolicy(
    max_attempts=2,
    first_delay=timedelta(milliseconds=20),
    max_delay=timedelta(milliseconds=20),
)


async def fail(session_or_job: Any, messages: Any) -> None:
    raise ValueError("no")


@pytest.mark.parametrize(
    "kind",
    [{}, {"batch": 2}, {"lease": timedelta(seconds=30)}],
    ids=["ordinary", "batch", "long"],
)
async def test_a_handler_is_retried_by_its_own_policy(
    database_url: str, kind: dict[str, Any]
) -> None:
    source = MemorySource(Message("own", b""), Message("common", b""))
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(source, sessions, name="billing", retry=QUICK)
        handles(consumer, "own", retry=TWICE, **kind)(fail)
        handles(consumer, "common", **kind)(fail)
        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered, 2)

    attempts = {e.topic: e.attempts for e in events.of(MessageDeadLettered)}
    assert attempts == {"own": 2, "common": 3}
    waits: dict[str, list[float]] = {"own": [], "common": []}
    for event in events.of(HandlerFailed):
        waits[event.topic].append(event.seconds_until_retry)
    assert waits["own"] == [0.02]
    assert len(waits["common"]) == 2
    assert max(waits["common"]) <= 0.005


async def test_a_message_that_used_up_the_starts_of_its_policy_is_dead_lettered(
    database_url: str,
) -> None:
    # As a broker counts deliveries to consumers that died.
    source = MemorySource()
    source.add(Message("own", b""), attempts=2)
    source.add(Message("common", b""), attempts=2)
    called: list[str] = []

    async def note(session: AsyncSession, message: Message) -> None:
        called.append(message.topic)

    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(source, sessions, name="billing", retry=QUICK)
        consumer.handles("own", retry=TWICE)(note)
        consumer.handles("common")(note)
        async with running(consumer) as events:
            (given_up,) = await events.wait_for(MessageDeadLettered)
            await events.wait_for(MessageHandled)
    assert given_up.attempts == 2
    assert given_up.reason == "started 2 times and never finished"
    assert called == ["common"]


async def test_a_failing_handlers_stack_trace_is_logged_once_and_redacted(
    database_url: str,
) -> None:
    def handle(session: Session, message: Message) -> None:
        raise ValueError(f"no customer of hunter2, attempt of {message.topic}")

    messages = [Message("a", b""), Message("b", b"")]
    async with consuming(
        database_url,
        MemorySource(*messages),
        handle,
        retry=QUICK,
        redact=lambda said: said.replace("hunter2", "…"),
    ) as events:
        given_up = await events.wait_for(MessageDeadLettered, 2)
        failed = await events.wait_for(HandlerFailed, 4)

    query = "SELECT topic, error_reason, error_stacktrace FROM inbox.dead_letter"
    stored = {topic: rest for topic, *rest in execute(database_url, query)}
    for message in messages:
        first, second = [one for one in failed if one.id == message.id]
        said = f"ValueError: no customer of …, attempt of {message.topic}"
        reason, trace = stored[message.topic]
        assert first.reason == reason == said
        for text in (first.stacktrace or "", trace):
            assert 'raise ValueError(f"no customer of …' in text
            assert said in text
            assert "hunter2" not in text
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

    source = MemorySource(Message("decided", b""), Message("failed", b""))
    terms = {"permanent": KeyError}
    async with consuming(database_url, source, handle, terms) as events:
        given_up = await events.wait_for(MessageDeadLettered, 2)

    traces = {one.topic: one.stacktrace for one in given_up}
    assert traces["decided"] is None
    assert 'raise KeyError("currency")' in (traces["failed"] or "")
