"""A job and its dead letter agree on attempts, whatever the broker counts."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from pillarbox import Consumer, DeadLetter, Message
from pillarbox.inbox.events import (
    DuplicateSkipped,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from pillarbox.inbox.jobs.job import AsyncJob
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.cloudevents.raw_text import storable
from tests.fixtures.consumers import QUICK, async_sessions_of, consuming, running
from tests.fixtures.dead_letters import give_up, retry
from tests.fixtures.jobs import LEASE, TOPIC, add_job, consumer_of, job_of, running_job
from tests.fixtures.sessions import execute

pytestmark = pytest.mark.timeout(180)


def dead_letters(url: str) -> list[tuple[Any, ...]]:
    return execute(url, "SELECT status, attempts, error_reason FROM inbox.dead_letter")


async def accept(job: AsyncJob, message: Message) -> None:
    """Accept the message."""


async def refuse(job: AsyncJob, message: Message) -> None:
    raise DeadLetter("no paper")


@pytest.mark.parametrize(("of_job", "of_delivery"), [(0, 2), (2, 0), (1, 1)])
async def test_the_attempts_of_the_job_count_and_not_those_of_the_delivery(
    of_job: int, of_delivery: int, database_url: str
) -> None:
    message, source = Message(TOPIC, b""), MemorySource()
    source.add(message, attempts=of_delivery)
    add_job(database_url, message, attempts=of_job)
    calls: list[int] = []

    async def render(job: AsyncJob, message: Message) -> None:
        calls.append(job.attempts)
        if len(calls) <= 3 - of_job:
            raise ValueError("no paper")

    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(source, sessions, name="reports", retry=QUICK, redact=str)
        consumer.job(TOPIC, lease=LEASE)(render)
        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered)
        assert calls == list(range(of_job + 1, 4))
        assert job_of(database_url)[:2] == ["failure", 3]
        assert dead_letters(database_url) == [("PENDING", 3, "ValueError: no paper")]

        assert await retry(consumer.retrier()) == Counter(succeeded=1)
    assert calls[3 - of_job :] == [1]
    assert job_of(database_url)[:2] == ["success", 1]


async def test_a_message_that_kills_its_process_is_dead_lettered_after_its_starts(
    database_url: str,
) -> None:
    message = Message(TOPIC, b"")
    add_job(database_url, message, "in_progress", 3)
    async with running_job(database_url, message, refuse) as events:
        await events.wait_for(MessageDeadLettered)
    reason = "started 3 times and never finished"
    assert job_of(database_url)[:2] == ["failure", 3]
    assert "started 3 times" in job_of(database_url)[3]
    assert dead_letters(database_url) == [("PENDING", 3, reason)]


async def test_a_handler_that_always_breaks_its_connection_finally_fails(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pillarbox.inbox.consuming.outage.RECONNECT", QUICK)
    broken = OperationalError(None, None, Exception("cut"), connection_invalidated=True)

    async def render(job: AsyncJob, message: Message) -> None:
        raise broken

    async with running_job(database_url, Message(TOPIC, b""), render) as events:
        await events.wait_for(MessageDeadLettered)
    assert job_of(database_url)[:2] == ["failure", 3]
    ((_, attempts, _),) = dead_letters(database_url)
    assert attempts == 3


@pytest.mark.parametrize(
    "reason", ["x" * 20_000, "😀" * 5000, "a\0b", "a\ud800b"], ids=ascii
)
async def test_a_job_ends_whatever_its_reason(reason: str, database_url: str) -> None:
    async def reject(job: AsyncJob, message: Message) -> None:
        raise DeadLetter(reason)

    async with running_job(database_url, Message(TOPIC, b""), reject) as events:
        await events.wait_for(MessageDeadLettered)
    assert job_of(database_url)[:2] == ["failure", 1]
    stored = job_of(database_url)[3]
    assert stored == f"DeadLetter: {storable(reason)}"[:4096]


async def test_a_message_that_cannot_be_upcast_ends_its_job(database_url: str) -> None:
    message = Message(TOPIC, b"", schema_version=1)
    async with running_job(database_url, message, accept, version=2) as events:
        await events.wait_for(MessageDeadLettered)
    assert job_of(database_url)[:2] == ["failure", 1]
    ((_, attempts, _),) = dead_letters(database_url)
    assert attempts == 1


async def test_a_failure_after_losing_the_lease_writes_no_dead_letter(
    database_url: str,
) -> None:
    message = Message(TOPIC, b"")

    async def lose(job: AsyncJob, message: Message) -> None:
        # As another process would while this one is frozen.
        execute(
            database_url, "UPDATE inbox.job SET lease = lease + 1, lease_until = now()"
        )
        raise DeadLetter("no paper")

    async with running_job(database_url, message, lose) as events:
        await events.wait_for(RetryRequested)
    async with running_job(database_url, message, accept) as events:
        await events.wait_for(MessageHandled)
    assert job_of(database_url)[:2] == ["success", 2]
    assert dead_letters(database_url) == []


async def test_the_dead_letter_of_a_released_job_is_handled_by_its_first_retry(
    database_url: str,
) -> None:
    message = Message(TOPIC, b"")
    add_job(database_url, message, attempts=3)
    give_up(database_url, message, schema="inbox", origin="consumer:reports")
    async with async_sessions_of(database_url) as sessions:
        consumer = consumer_of(sessions)
        consumer.job(TOPIC, lease=LEASE)(accept)
        assert await retry(consumer.retrier()) == Counter(succeeded=1)
    assert job_of(database_url)[:2] == ["success", 1]


async def test_a_redelivered_discarded_message_is_not_dead_lettered_again(
    database_url: str,
) -> None:
    message = Message(TOPIC, b"")
    source = MemorySource(message)
    async with consuming(database_url, source, refuse, {"lease": LEASE}) as events:
        await events.wait_for(MessageDeadLettered)
        which = ["--side=inbox", "--topic=*", "--reason=no", "--database", database_url]
        command = ["dead-letters", "discard", *which]
        assert await asyncio.to_thread(main, command) == 0
        source.add(message)
        await events.wait_for(DuplicateSkipped)
    ((status, _, _),) = dead_letters(database_url)
    assert status == "DISCARDED"
