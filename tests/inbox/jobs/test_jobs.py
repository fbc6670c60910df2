"""Jobs of long handlers are leased, released, resumed, and never run twice at once."""

import asyncio
from collections.abc import Callable

import pytest

import pillarbox
from pillarbox import DeadLetter, Message, idempotent
from pillarbox.inbox.errors import InvalidReceiptError
from pillarbox.inbox.events import (
    DuplicateSkipped,
    FinishedJobFailed,
    MessageDeadLettered,
    MessageHandled,
)
from pillarbox.inbox.jobs.job import AsyncJob
from pillarbox.inbox.jobs.lease import JobLease
from pillarbox.inbox.sources.memory import MemorySource
from tests.fixtures.consumers import consuming
from tests.fixtures.effects import EFFECT, effects, receipts
from tests.fixtures.effects import note as note_message
from tests.fixtures.jobs import BRIEF, LEASE, TOPIC, job_of, note, running_job
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import let_pass


@pytest.mark.parametrize("driver", ["psycopg async", "asyncpg"])
async def test_a_long_handler_uses_its_own_transactions(url: str, driver: str) -> None:
    message = Message(TOPIC, b"")
    source = MemorySource(message)

    async def render(job: AsyncJob, message: Message) -> None:
        async with job.transaction() as session:
            await session.execute(EFFECT, {"what": "one"})
            pillarbox.add(session, Message("reports.begun", b""))
        assert effects(url) == ["one"]
        async with job.finish() as session:
            await session.execute(EFFECT, {"what": "two"})
            pillarbox.add(session, Message("reports.ready", b""))

    terms = {"lease": LEASE}
    async with consuming(
        url, source, render, terms, name="reports", driver=driver
    ) as events:
        await events.wait_for(MessageHandled)
        source.add(message)
        await events.wait_for(DuplicateSkipped)

    assert effects(url) == ["one", "two"]
    assert job_of(url) == ["success", 1, 1, None, True, None]
    assert receipts(url) == 1
    causes = execute(url, "SELECT headers ->> 'causation-id' FROM outbox.message")
    assert causes == [(str(message.id),)] * 2


async def test_a_job_cannot_call_functions_of_its_own_consumer(url: str) -> None:
    refused: list[str] = []
    bill = idempotent(consumer="reports")(note_message)

    async def render(job: AsyncJob, message: Message) -> None:
        for block in (job.transaction, job.finish):
            try:
                async with block() as session:
                    await bill(session, message)
            except InvalidReceiptError as error:
                refused.append(str(error))

    async with running_job(url, Message(TOPIC, b"bill"), render) as events:
        await events.wait_for(MessageHandled)
    assert len(refused) == 2
    assert all("its own consumer name" in each for each in refused)
    assert effects(url) == []
    assert receipts(url) == 1


async def test_an_error_after_the_end_of_a_job_is_reported(url: str) -> None:
    async def render(job: AsyncJob, message: Message) -> None:
        async with job.finish() as session:
            await session.execute(EFFECT, {"what": "done"})
        await note(job, "too late")

    async with running_job(url, Message(TOPIC, b""), render) as events:
        (failed,) = await events.wait_for(FinishedJobFailed)
        await events.wait_for(MessageHandled)
    assert "JobLostError" in failed.reason
    assert failed.stacktrace is not None
    assert "test_jobs.py" in failed.stacktrace
    assert effects(url) == ["done"]
    assert job_of(url)[0] == "success"


async def test_a_handler_is_not_interrupted_after_it_has_finished_its_job(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    was_not_renewed = asyncio.Event()
    keep = JobLease.keep

    async def keep_and_tell(lease: JobLease, is_finishing: Callable[[], bool]) -> None:
        await keep(lease, is_finishing)
        was_not_renewed.set()

    async def render(job: AsyncJob, message: Message) -> None:
        async with job.finish() as session:
            await session.execute(EFFECT, {"what": "done"})
        try:
            # Now the job looks to its heartbeat as if another process had taken it.
            await was_not_renewed.wait()
            await asyncio.to_thread(let_pass, 0.1)
            ended.append("in its own time")
        except asyncio.CancelledError:
            ended.append("interrupted")
            raise

    monkeypatch.setattr(JobLease, "keep", keep_and_tell)
    async with running_job(url, Message(TOPIC, b""), render, lease=BRIEF) as events:
        await events.wait_for(MessageHandled)
    assert ended == ["in its own time"]
    assert job_of(url)[0] == "success"


async def test_a_message_with_an_ordinary_receipt_is_skipped(url: str) -> None:
    message = Message(TOPIC, b"ordinary")

    async def render(job: AsyncJob, message: Message) -> None:
        await note(job, "again")

    ordinary = consuming(url, MemorySource(message), note_message, name="reports")
    async with ordinary as events:
        await events.wait_for(MessageHandled)
    async with running_job(url, message, render) as events:
        await events.wait_for(DuplicateSkipped)
    assert effects(url) == ["ordinary"]
    assert job_of(url)[0] == "skipped"


@pytest.mark.parametrize("error", [DeadLetter("no such report"), KeyError("report")])
async def test_a_permanent_failure_ends_the_job_at_once(
    error: Exception, url: str
) -> None:
    async def render(job: AsyncJob, message: Message) -> None:
        raise error

    message = Message(TOPIC, b"")
    async with running_job(url, message, render, permanent=KeyError) as events:
        await events.wait_for(MessageDeadLettered)
    assert job_of(url)[:2] == ["failure", 1]


async def test_a_stop_releases_the_job_and_another_process_resumes_it(url: str) -> None:
    message, begun = Message(TOPIC, b""), asyncio.Event()

    async def begin(job: AsyncJob, message: Message) -> None:
        await job.save({"page": 7})
        begun.set()
        await asyncio.Event().wait()

    async def resume(job: AsyncJob, message: Message) -> None:
        await note(job, f"page {job.checkpoint['page']}, attempt {job.attempts}")

    async with running_job(url, message, begin):
        await begun.wait()
    assert job_of(url) == ["queued", 0, 1, None, False, {"page": 7}]
    async with running_job(url, message, resume) as events:
        await events.wait_for(MessageHandled)
    assert effects(url) == ["page 7, attempt 1"]
