"""Long handlers: leased, given back, resumed, cancelled, and never twice at once."""

import asyncio
import threading
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from inbox import Consumer, DeadLetter
from inbox.cli import main
from inbox.errors import JobLostError
from inbox.events import (
    DuplicateSkipped,
    HandlerFailed,
    MessageCancelled,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from inbox.job import AsyncJob, Job
from inbox.sources.memory import MemorySource
from outbox import Message
from outbox.errors import ConfigError
from tests.fixtures.consumers import QUICK, async_sessions_of, running, sessions_of
from tests.fixtures.relay import execute

TOPIC = "reports.requested"
LEASE = timedelta(seconds=2)
EFFECT = text("INSERT INTO effect (what) VALUES (:what)")


@pytest.fixture
def url(database_url: str) -> str:
    execute(database_url, "CREATE TABLE effect (what text)")
    return database_url


@pytest.fixture(params=["psycopg", "asyncpg"])
async def sessions(
    url: str, request: pytest.FixtureRequest
) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    async with async_sessions_of(url, request.param) as made:
        yield made


def effects(url: str) -> list[str]:
    return [what for (what,) in execute(url, "SELECT what FROM effect ORDER BY what")]


def job_of(url: str) -> Any:
    columns = "state, attempts, lease, reason, finished_at IS NOT NULL, checkpoint"
    ((*row,),) = execute(url, f"SELECT {columns} FROM inbox.job")
    return row


def receipts(url: str) -> int:
    ((count,),) = execute(url, "SELECT count(*) FROM inbox.receipt")
    return int(count)


async def note(job: AsyncJob, what: str) -> None:
    async with job.transaction() as session:
        await session.execute(EFFECT, {"what": what})


def consumer_of(sessions: Any, *messages: Message, **changes: Any) -> Consumer:
    return Consumer(
        MemorySource(*messages), sessions, name="reports", retry=QUICK, **changes
    )


async def test_a_long_handler_works_in_transactions_of_its_own(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message = Message(TOPIC, b"")
    consumer = consumer_of(sessions, message, message)

    @consumer.handles(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        await note(job, "one")
        assert effects(url) == ["one"]
        async with job.finish() as session:
            await session.execute(EFFECT, {"what": "two"})

    async with running(consumer) as events:
        await events.wait_for(MessageHandled)
        await events.wait_for(DuplicateSkipped)

    assert effects(url) == ["one", "two"]
    assert job_of(url) == ["success", 1, 1, None, True, None]
    assert receipts(url) == 1


async def test_a_plain_function_may_be_long_too(url: str) -> None:
    with sessions_of(url) as sessions:
        consumer = consumer_of(sessions, Message(TOPIC, b""))

        @consumer.handles(TOPIC, lease=LEASE)
        def render(job: Job, message: Message) -> None:
            with job.transaction() as session:
                session.execute(EFFECT, {"what": "one"})

        async with running(consumer) as events:
            await events.wait_for(MessageHandled)

    assert effects(url) == ["one"]
    assert job_of(url)[0] == "success"
    assert receipts(url) == 1


async def test_what_was_handled_in_the_ordinary_way_is_skipped(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message = Message(TOPIC, b"")
    ordinary = consumer_of(sessions, message)

    @ordinary.handles(TOPIC)
    async def handle(session: AsyncSession, message: Message) -> None:
        pass

    async with running(ordinary) as events:
        await events.wait_for(MessageHandled)
    long = consumer_of(sessions, message)

    @long.handles(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        await note(job, "again")

    async with running(long) as events:
        await events.wait_for(DuplicateSkipped)
    assert effects(url) == []
    assert job_of(url)[0] == "skipped"


async def test_failures_are_counted_and_end_in_the_dead_letters(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = consumer_of(sessions, Message(TOPIC, b""))

    @consumer.handles(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        await note(job, f"attempt {job.attempts}")
        raise ValueError("no paper")

    async with running(consumer) as events:
        await events.wait_for(MessageDeadLettered)
        assert len(events.of(HandlerFailed)) == 2

    assert effects(url) == ["attempt 1", "attempt 2", "attempt 3"]
    assert job_of(url)[:4] == ["failure", 3, 3, "ValueError: no paper"]
    ((reason,),) = execute(url, "SELECT error_reason FROM inbox.dead_letter")
    assert "no paper" in reason


@pytest.mark.parametrize("error", [DeadLetter("no such report"), KeyError("report")])
async def test_a_permanent_failure_ends_the_job_at_once(
    error: Exception, url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = consumer_of(sessions, Message(TOPIC, b""))

    @consumer.handles(TOPIC, lease=LEASE, permanent=KeyError)
    async def render(job: AsyncJob, message: Message) -> None:
        raise error

    async with running(consumer) as events:
        await events.wait_for(MessageDeadLettered)
    assert job_of(url)[:2] == ["failure", 1]


async def test_a_stop_gives_the_job_back_and_another_goes_on_where_it_was(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message = Message(TOPIC, b"")
    begun = asyncio.Event()
    first = consumer_of(sessions, message)

    @first.handles(TOPIC, lease=LEASE)
    async def begin(job: AsyncJob, message: Message) -> None:
        await job.save({"page": 7})
        begun.set()
        await asyncio.Event().wait()

    async with running(first):
        await begun.wait()
    assert job_of(url) == ["queued", 0, 1, None, False, {"page": 7}]

    second = consumer_of(sessions, message)

    @second.handles(TOPIC, lease=LEASE)
    async def go_on(job: AsyncJob, message: Message) -> None:
        await note(job, f"page {job.checkpoint['page']}, attempt {job.attempts}")

    async with running(second) as events:
        await events.wait_for(MessageHandled)
    assert effects(url) == ["page 7, attempt 1"]


async def cancel(url: str, message: Message) -> int:
    arguments = ["cancel", "--database", url, "reports", str(message.id)]
    return await asyncio.to_thread(main, arguments)


async def test_a_cancel_reaches_a_running_coroutine(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message, begun = Message(TOPIC, b""), asyncio.Event()
    consumer = consumer_of(sessions, message)

    @consumer.handles(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        await note(job, "begun")
        begun.set()
        await asyncio.Event().wait()

    async with running(consumer) as events:
        await begun.wait()
        assert await cancel(url, message) == 0
        await events.wait_for(MessageCancelled)
    assert effects(url) == ["begun"]
    assert job_of(url)[0] == "cancelled"
    assert await cancel(url, message) == 1


async def test_a_cancel_is_seen_by_a_running_function(url: str) -> None:
    message, begun = Message(TOPIC, b""), threading.Event()
    with sessions_of(url) as sessions:
        consumer = consumer_of(sessions, message)

        @consumer.handles(TOPIC, lease=LEASE)
        def render(job: Job, message: Message) -> None:
            begun.set()
            while not job.cancelled:
                threading.Event().wait(0.01)
            raise InterruptedError

        async with running(consumer) as events:
            await asyncio.to_thread(begun.wait)
            assert await cancel(url, message) == 0
            await events.wait_for(MessageCancelled)
    assert job_of(url)[0] == "cancelled"


async def test_what_was_cancelled_before_it_came_never_begins(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message = Message(TOPIC, b"")
    assert await cancel(url, message) == 0
    consumer = consumer_of(sessions, message)

    @consumer.handles(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        await note(job, "begun")

    async with running(consumer) as events:
        await events.wait_for(MessageCancelled)
    assert effects(url) == []
    assert job_of(url)[:2] == ["cancelled", 0]


async def test_who_lost_the_lease_commits_nothing(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = consumer_of(sessions, Message(TOPIC, b""))
    lost: list[type[BaseException]] = []

    @consumer.handles(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        if job.attempts > 1:
            return
        # As another process would, when this one was frozen.
        execute(url, "UPDATE inbox.job SET lease = lease + 1, lease_until = now()")
        try:
            await note(job, "too late")
        except JobLostError as error:
            lost.append(type(error))
            raise

    async with running(consumer) as events:
        await events.wait_for(MessageHandled)
    assert lost == [JobLostError]
    assert effects(url) == []


async def test_a_job_that_another_process_has_is_waited_for(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message = Message(TOPIC, b"")
    execute(
        url,
        "INSERT INTO inbox.job (message_id, message_at, consumer, state, lease_until,"
        f" lease, attempts) VALUES ('{message.id}', inbox.moment_of('{message.id}'),"
        " 'reports', 'in_progress', now() + interval '500 milliseconds', 1, 1)",
    )
    consumer = consumer_of(sessions, message)

    @consumer.handles(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        await note(job, f"attempt {job.attempts}")

    async with running(consumer) as events:
        await events.wait_for(RetryRequested)
        await events.wait_for(MessageHandled)
    assert effects(url) == ["attempt 2"]


async def test_what_takes_too_long_is_timed_out(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = consumer_of(sessions, Message(TOPIC, b""))

    @consumer.handles(TOPIC, lease=LEASE, time_limit=timedelta(milliseconds=20))
    async def render(job: AsyncJob, message: Message) -> None:
        await asyncio.Event().wait()

    async with running(consumer) as events:
        await events.wait_for(MessageDeadLettered)
    assert job_of(url)[:2] == ["timed_out", 3]


async def test_what_was_started_too_often_is_not_started_again(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message = Message(TOPIC, b"")
    execute(
        url,
        "INSERT INTO inbox.job (message_id, message_at, consumer, attempts)"
        f" VALUES ('{message.id}', inbox.moment_of('{message.id}'), 'reports', 3)",
    )
    consumer = consumer_of(sessions, message)

    @consumer.handles(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        await note(job, "killed the process")

    async with running(consumer) as events:
        await events.wait_for(MessageDeadLettered)
    assert effects(url) == []
    state, _, _, reason, *_ = job_of(url)
    assert state == "failure"
    assert "started 3 times" in reason


async def test_jobs_are_listed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = Message(TOPIC, b"")
    await cancel(url, message)
    capsys.readouterr()

    assert await asyncio.to_thread(main, ["jobs", "--database", url]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "state"
    assert "waiting" in line
    assert str(message.id) in line


@pytest.mark.parametrize("id", ["7", "00000000-0000-4000-8000-000000000000"])
def test_an_id_that_is_none_is_told(
    id: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cancel", "--database", url, "reports", id]) == 2
    assert "isn't a UUIDv7" in capsys.readouterr().err


def test_a_lease_that_is_too_short_is_refused(url: str) -> None:
    with sessions_of(url) as sessions:
        consumer = consumer_of(sessions)
        with pytest.raises(ConfigError, match="at least a second"):
            consumer.handles(TOPIC, lease=timedelta(milliseconds=1))(print)
