"""Whatever runs concurrently, the handler of a dead letter takes effect once."""

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from pillarbox import Consumer, DeadLetter, Message
from pillarbox.inbox.events import FinishedJobFailed, MessageDeadLettered
from pillarbox.inbox.jobs.job import AsyncJob
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.dead_letters.criteria import Criteria
from pillarbox.outbox.dead_letters.retry import Outcome
from pillarbox.outbox.events import Event
from tests.fixtures.consumers import running
from tests.fixtures.dead_letters import find, give_up, retry, states
from tests.fixtures.effects import effects, note, receipts
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

pytestmark = pytest.mark.timeout(180)

PENDING = Criteria()


async def test_a_concurrent_retry_and_redelivery_have_one_effect(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    source = MemorySource()
    consumer = Consumer(source, sessions, name="billing")
    at_work = asyncio.Event()
    proceed = asyncio.Event()

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        await note(session, message)
        at_work.set()
        await proceed.wait()

    message = Message("orders", b"once")
    give_up(url, message, schema="inbox")
    retrying = asyncio.create_task(retry(consumer.retrier()))
    await at_work.wait()
    source.add(message)
    at_run = asyncio.create_task(consumer.run())
    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        " AND datname = current_database()"
    )
    await asyncio.to_thread(
        wait_for,
        "the redelivery waits at the receipt for the retry's transaction",
        lambda: execute(url, waiting) == [(1,)],
    )
    proceed.set()
    assert await retrying == Counter(succeeded=1)
    await asyncio.to_thread(wait_for, "it is acked", lambda: source.acked)
    consumer.stop()
    await at_run
    assert effects(url) == ["once"]
    assert states(url, "inbox") == [("SUCCEEDED", 0, "refused")]


async def test_two_concurrent_retries_of_one_dead_letter_have_one_effect(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = Consumer(MemorySource(), sessions, name="billing")
    at_work = asyncio.Event()
    proceed = asyncio.Event()

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        await note(session, message)
        at_work.set()
        await proceed.wait()

    message = Message("orders", b"once")
    give_up(url, message, schema="inbox")
    async with consumer.retrier() as one, consumer.retrier() as other:
        (candidate,) = await find(one, PENDING)
        first = asyncio.create_task(one.retry(candidate))
        await at_work.wait()
        second = asyncio.create_task(other.retry(candidate))
        proceed.set()
        assert await first is Outcome.SUCCEEDED
        assert await second is Outcome.SKIPPED
    give_up(url, message, schema="inbox")
    assert await retry(consumer.retrier()) == Counter(succeeded=1), "a duplicate"
    assert effects(url) == ["once"]
    assert receipts(url) == 1


async def test_a_discard_during_a_retry_waits_and_is_too_late(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = Consumer(MemorySource(), sessions, name="billing")
    discarding: list[asyncio.Task[Any]] = []

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        await note(session, message)
        discarding.append(
            asyncio.create_task(
                asyncio.to_thread(
                    execute,
                    url,
                    "UPDATE inbox.dead_letter SET status = 'DISCARDED',"
                    " discard_reason = 'by hand' WHERE status = 'PENDING'",
                )
            )
        )

    give_up(url, Message("orders", b"once"), schema="inbox")
    assert await retry(consumer.retrier()) == Counter(succeeded=1)
    await discarding[0]
    assert states(url, "inbox") == [("SUCCEEDED", 0, "refused")]


async def test_a_failed_long_handler_is_restarted_by_a_retry(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    source = MemorySource()
    consumer = Consumer(source, sessions, name="billing", redact=str)
    calls: list[Message] = []

    @consumer.job("reports", lease=timedelta(seconds=30))
    async def handle(job: AsyncJob, message: Message) -> None:
        calls.append(message)
        if len(calls) < 3:
            raise DeadLetter("no paper")
        async with job.finish() as session:
            await note(session, message)
        raise RuntimeError("afterwards")

    message = Message("reports", b"once")
    reported: list[Event] = []
    async with running(consumer) as events:
        source.add(message)
        await events.wait_for(MessageDeadLettered)
    assert await retry(consumer.retrier()) == Counter(failed=1)
    retrier = consumer.retrier(None, reported.append)
    assert await retry(retrier) == Counter(succeeded=1)
    (late,) = (event for event in reported if isinstance(event, FinishedJobFailed))
    assert late.reason == "RuntimeError: afterwards"
    assert effects(url) == ["once"]
    assert [row[:2] for row in states(url, "inbox")] == [("SUCCEEDED", 1)]
