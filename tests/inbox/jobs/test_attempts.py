"""A job and its dead letter agree on attempts, whatever the broker counts."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from inbox.events import (
    DuplicateSkipped,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from inbox.jobs.job import AsyncJob
from inbox.sources.memory import MemorySource
from outbox.cli.main import main
from outbox.dead_letters.retry import RetryCounts
from pillarbox import Consumer, DeadLetter, Message
from tests.fixtures.consumers import QUICK, async_sessions_of, running
from tests.fixtures.dead_letters import give_up, retry
from tests.fixtures.jobs import BRIEF, LEASE, TOPIC, consumer_of, job_of
from tests.fixtures.sessions import execute

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
async def sessions(
    database_url: str,
) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    async with async_sessions_of(database_url) as made:
        yield made


def dead_letters(url: str) -> list[tuple[Any, ...]]:
    return execute(url, "SELECT status, attempts, error_reason FROM inbox.dead_letter")


def add_job(
    url: str, message: Message, state: str, attempts: int, *, finished: str = "NULL"
) -> None:
    """Insert a job as a dead process would have left it."""
    execute(
        url,
        "INSERT INTO inbox.job (message_id, message_at, consumer, state, attempts,"
        " finished_at)"
        f" VALUES ('{message.id}', inbox.moment_of('{message.id}'), 'reports',"
        f" '{state}', {attempts}, {finished})",
    )


@pytest.mark.parametrize(("of_job", "of_delivery"), [(0, 2), (2, 0), (1, 1)])
async def test_the_attempts_of_the_job_count_and_not_those_of_the_delivery(
    of_job: int,
    of_delivery: int,
    database_url: str,
    sessions: async_sessionmaker[AsyncSession],
) -> None:
    message, source = Message(TOPIC, b""), MemorySource()
    source.return_later(message, of_delivery, timedelta(0))
    add_job(database_url, message, "queued", of_job)
    consumer = Consumer(source, sessions, name="reports", retry=QUICK)
    calls: list[int] = []

    @consumer.job(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        calls.append(job.attempts)
        if len(calls) <= 3 - of_job:
            raise ValueError("no paper")

    async with running(consumer) as events:
        await events.wait_for(MessageDeadLettered)
    assert calls == list(range(of_job + 1, 4))
    assert job_of(database_url)[:2] == ["failure", 3]
    assert dead_letters(database_url) == [("PENDING", 3, "ValueError: no paper")]

    assert await retry(consumer.retrier()) == RetryCounts(succeeded=1)
    assert calls[3 - of_job :] == [1]
    assert job_of(database_url)[:2] == ["success", 1]


async def test_a_message_that_kills_its_process_is_dead_lettered_after_its_starts(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message = Message(TOPIC, b"")
    add_job(database_url, message, "in_progress", 3)
    consumer = consumer_of(sessions, message)

    @consumer.job(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        pass

    async with running(consumer) as events:
        await events.wait_for(MessageDeadLettered)
    reason = "was started 3 times and never finished"
    assert job_of(database_url)[:2] == ["failure", 3]
    assert dead_letters(database_url) == [("PENDING", 3, reason)]


async def test_attempts_of_a_process_that_died_are_kept_in_the_dead_letter(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message = Message(TOPIC, b"")
    add_job(database_url, message, "failure", 3, finished="now()")
    consumer = consumer_of(sessions, message)

    @consumer.job(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        pass

    async with running(consumer) as events:
        await events.wait_for(MessageDeadLettered)
    assert job_of(database_url)[:2] == ["failure", 3]
    ((_, attempts, _),) = dead_letters(database_url)
    assert attempts == 3


async def test_a_handler_that_always_breaks_its_connection_finally_fails(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = consumer_of(sessions, Message(TOPIC, b""))
    broken = OperationalError(None, None, Exception("cut"), connection_invalidated=True)

    @consumer.job(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        raise broken

    async with running(consumer) as events:
        await events.wait_for(MessageDeadLettered, timeout=60)
    assert job_of(database_url)[:2] == ["failure", 3]
    ((_, attempts, _),) = dead_letters(database_url)
    assert attempts == 3


async def test_a_message_that_cannot_be_upcast_ends_its_job(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message = Message(TOPIC, b"", schema_version=2)
    add_job(database_url, message, "queued", 0)
    consumer = consumer_of(sessions, message)

    @consumer.job(TOPIC, lease=LEASE, version=1)
    async def render(job: AsyncJob, message: Message) -> None:
        pass

    async with running(consumer) as events:
        await events.wait_for(MessageDeadLettered)
    assert job_of(database_url)[:2] == ["failure", 1]
    ((_, attempts, _),) = dead_letters(database_url)
    assert attempts == 1


async def test_a_failure_after_losing_the_lease_writes_no_dead_letter(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = consumer_of(sessions, Message(TOPIC, b""))

    @consumer.job(TOPIC, lease=BRIEF)
    async def render(job: AsyncJob, message: Message) -> None:
        if job.attempts > 1:
            return
        # As another process would while this one is frozen.
        execute(
            database_url, "UPDATE inbox.job SET lease = lease + 1, lease_until = now()"
        )
        raise DeadLetter("no paper")

    async with running(consumer) as events:
        await events.wait_for(RetryRequested)
        await events.wait_for(MessageHandled)
    assert job_of(database_url)[:2] == ["success", 2]
    assert dead_letters(database_url) == []


async def test_the_dead_letter_of_a_released_job_is_handled_by_its_first_retry(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message = Message(TOPIC, b"")
    add_job(database_url, message, "queued", 3)
    give_up(database_url, message, schema="inbox", origin="consumer:reports")
    consumer = consumer_of(sessions)

    @consumer.job(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        pass

    assert await retry(consumer.retrier()) == RetryCounts(succeeded=1)
    assert job_of(database_url)[:2] == ["success", 1]


async def test_a_redelivered_discarded_message_is_not_dead_lettered_again(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message, source = Message(TOPIC, b""), MemorySource()
    consumer = Consumer(source, sessions, name="reports", retry=QUICK)

    @consumer.job(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        raise DeadLetter("no paper")

    async with running(consumer) as events:
        source.add(message)
        await events.wait_for(MessageDeadLettered)
        command = [
            "dead-letters",
            "discard",
            "--side=inbox",
            "--topic=*",
            "--reason=no",
        ]
        arguments = [*command, "--database", database_url]
        assert await asyncio.to_thread(main, arguments) == 0
        source.add(message)
        await events.wait_for(DuplicateSkipped)
    ((status, _, _),) = dead_letters(database_url)
    assert status == "DISCARDED"
