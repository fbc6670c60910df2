"""Jobs of long handlers are leased, released, resumed, and never run twice at once."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

import outbox
from inbox import DeadLetter, InvalidReceiptError, idempotent
from inbox.events import (
    DuplicateSkipped,
    FinishedJobFailed,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
)
from inbox.jobs.job import AsyncJob, Job
from outbox import Message
from tests.fixtures.consumers import async_sessions_of, running, sessions_of
from tests.fixtures.jobs import (
    BRIEF,
    EFFECT,
    EFFECTS,
    LEASE,
    TOPIC,
    consumer_of,
    effects,
    job_of,
    note,
    receipts,
)
from tests.fixtures.sessions import execute


@pytest.fixture
def url(database_url: str) -> str:
    execute(database_url, EFFECTS)
    return database_url


@pytest.fixture(params=["psycopg", "asyncpg"])
async def sessions(
    url: str, request: pytest.FixtureRequest
) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    async with async_sessions_of(url, request.param) as made:
        yield made


async def test_a_long_handler_uses_its_own_transactions(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message = Message(TOPIC, b"")
    consumer = consumer_of(sessions, message, message)

    @consumer.handles(TOPIC, lease=BRIEF)
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


async def test_only_the_last_transaction_can_call_functions_of_the_jobs_consumer(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message = Message(TOPIC, b"")
    consumer = consumer_of(sessions, message, message)
    refused: list[str] = []

    @idempotent(consumer="reports")
    async def bill(session: AsyncSession, message: Message) -> None:
        await session.execute(EFFECT, {"what": "bill"})

    @idempotent(consumer="reports")
    async def mail(session: AsyncSession, message: Message) -> None:
        await session.execute(EFFECT, {"what": "mail"})

    @consumer.handles(TOPIC, lease=BRIEF)
    async def render(job: AsyncJob, message: Message) -> None:
        try:
            async with job.transaction() as session:
                await bill(session, message)
        except InvalidReceiptError as error:
            refused.append(str(error))
        async with job.finish() as session:
            await bill(session, message)
            await mail(session, message)

    async with running(consumer) as events:
        await events.wait_for(MessageHandled)
        await events.wait_for(DuplicateSkipped)
    assert len(refused) == 1
    assert "a consumer name of its own" in refused[0]
    assert effects(url) == ["bill", "mail"]
    assert receipts(url) == 1


async def test_an_error_after_the_end_of_a_job_is_reported(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = consumer_of(sessions, Message(TOPIC, b""))

    @consumer.handles(TOPIC, lease=BRIEF)
    async def render(job: AsyncJob, message: Message) -> None:
        async with job.finish() as session:
            await session.execute(EFFECT, {"what": "done"})
        async with job.transaction() as session:
            await session.execute(EFFECT, {"what": "too late"})

    async with running(consumer) as events:
        (failed,) = await events.wait_for(FinishedJobFailed)
        await events.wait_for(MessageHandled)
    assert "JobLostError" in failed.reason
    assert failed.stacktrace is not None
    assert "test_jobs.py" in failed.stacktrace
    assert effects(url) == ["done"]
    assert job_of(url)[0] == "success"


async def test_messages_added_by_a_long_handler_have_its_causation_id(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message = Message(TOPIC, b"")
    consumer = consumer_of(sessions, message)

    @consumer.handles(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        async with job.transaction() as session:
            outbox.add(session, Message("reports.begun", b""))
        async with job.finish() as session:
            outbox.add(session, Message("reports.ready", b""))

    async with running(consumer) as events:
        await events.wait_for(MessageHandled)
    causes = execute(url, "SELECT headers ->> 'causation-id' FROM outbox.message")
    assert causes == [(str(message.id),)] * 2


async def test_a_plain_function_can_be_a_long_handler(url: str) -> None:
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


async def test_a_message_with_an_ordinary_receipt_is_skipped(
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


async def test_failures_are_counted_and_finally_dead_letter_the_message(
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


async def test_a_stop_releases_the_job_and_another_process_resumes_it(
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
    async def resume(job: AsyncJob, message: Message) -> None:
        await note(job, f"page {job.checkpoint['page']}, attempt {job.attempts}")

    async with running(second) as events:
        await events.wait_for(MessageHandled)
    assert effects(url) == ["page 7, attempt 1"]
