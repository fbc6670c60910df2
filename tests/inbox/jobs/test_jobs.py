"""Jobs of long handlers are leased, released, resumed, and never run twice at once."""

import asyncio

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

import pillarbox
from inbox.errors import InvalidReceiptError
from inbox.events import (
    DuplicateSkipped,
    FinishedJobFailed,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
)
from inbox.jobs.job import AsyncJob, Job
from pillarbox import DeadLetter, Message, idempotent
from tests.fixtures.consumers import running, sessions_of
from tests.fixtures.jobs import (
    BRIEF,
    EFFECT,
    LEASE,
    TOPIC,
    consumer_of,
    effects,
    job_of,
    note,
    receipts,
)
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import let_pass


async def test_a_long_handler_uses_its_own_transactions(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message = Message(TOPIC, b"")
    consumer = consumer_of(sessions, message, message)

    @consumer.job(TOPIC, lease=BRIEF)
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


async def test_a_job_cannot_call_functions_of_its_own_consumer(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = consumer_of(sessions, Message(TOPIC, b""))
    refused: list[str] = []

    @idempotent(consumer="reports")
    async def bill(session: AsyncSession, message: Message) -> None:
        await session.execute(EFFECT, {"what": "bill"})

    @consumer.job(TOPIC, lease=BRIEF)
    async def render(job: AsyncJob, message: Message) -> None:
        for block in (job.transaction, job.finish):
            try:
                async with block() as session:
                    await bill(session, message)
            except InvalidReceiptError as error:
                refused.append(str(error))

    async with running(consumer) as events:
        await events.wait_for(MessageHandled)
    assert len(refused) == 2
    assert all("a consumer name of its own" in each for each in refused)
    assert effects(url) == []
    assert receipts(url) == 1


async def test_an_error_after_the_end_of_a_job_is_reported(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = consumer_of(sessions, Message(TOPIC, b""))

    @consumer.job(TOPIC, lease=BRIEF)
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


async def test_a_handler_is_not_interrupted_after_it_has_finished_its_job(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = consumer_of(sessions, Message(TOPIC, b""))
    ended: list[str] = []

    @consumer.job(TOPIC, lease=BRIEF)
    async def render(job: AsyncJob, message: Message) -> None:
        async with job.finish() as session:
            await session.execute(EFFECT, {"what": "done"})
        try:
            await asyncio.to_thread(let_pass, 2 * BRIEF.total_seconds())
            ended.append("in its own time")
        except asyncio.CancelledError:
            ended.append("interrupted")
            raise

    async with running(consumer) as events:
        await events.wait_for(MessageHandled)
    assert ended == ["in its own time"]
    assert job_of(url)[0] == "success"


async def test_messages_added_by_a_long_handler_have_its_causation_id(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message = Message(TOPIC, b"")
    consumer = consumer_of(sessions, message)

    @consumer.job(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        async with job.transaction() as session:
            pillarbox.add(session, Message("reports.begun", b""))
        async with job.finish() as session:
            pillarbox.add(session, Message("reports.ready", b""))

    async with running(consumer) as events:
        await events.wait_for(MessageHandled)
    causes = execute(url, "SELECT headers ->> 'causation-id' FROM outbox.message")
    assert causes == [(str(message.id),)] * 2


async def test_a_plain_function_can_be_a_long_handler(url: str) -> None:
    with sessions_of(url) as sessions:
        consumer = consumer_of(sessions, Message(TOPIC, b""))

        @consumer.job(TOPIC, lease=LEASE)
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

    @long.job(TOPIC, lease=LEASE)
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

    @consumer.job(TOPIC, lease=LEASE)
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

    @consumer.job(TOPIC, lease=LEASE, permanent=KeyError)
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

    @first.job(TOPIC, lease=LEASE)
    async def begin(job: AsyncJob, message: Message) -> None:
        await job.save({"page": 7})
        begun.set()
        await asyncio.Event().wait()

    async with running(first):
        await begun.wait()
    assert job_of(url) == ["queued", 0, 1, None, False, {"page": 7}]

    second = consumer_of(sessions, message)

    @second.job(TOPIC, lease=LEASE)
    async def resume(job: AsyncJob, message: Message) -> None:
        await note(job, f"page {job.checkpoint['page']}, attempt {job.attempts}")

    async with running(second) as events:
        await events.wait_for(MessageHandled)
    assert effects(url) == ["page 7, attempt 1"]
