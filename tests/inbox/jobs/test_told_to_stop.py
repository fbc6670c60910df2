"""The outcome when a long handler is asked to stop and returns, or continues."""

import asyncio
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Final

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from inbox.errors import HandlerTimeoutError, JobLostError
from inbox.events import MessageCancelled, MessageDeadLettered, MessageHandled
from inbox.jobs.job import AnyJob, AsyncJob, Job
from outbox.postgres.connection import conninfo
from pillarbox import Message
from tests.fixtures.consumers import running, sessions_of
from tests.fixtures.jobs import (
    EFFECT,
    LEASE,
    TOPIC,
    cancel,
    consumer_of,
    effects,
    job_of,
    receipts,
)
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

pytestmark = pytest.mark.timeout(180)

RELEASED: Final = ["queued", 0, 1, None, False, {"page": 3}]


WAITING: Final = (
    "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    " AND datname = current_database()"
)


async def test_a_function_that_sees_the_stop_and_returns_has_not_finished(
    url: str,
) -> None:
    message, begun = Message(TOPIC, b""), threading.Event()
    with sessions_of(url) as sessions:
        first = consumer_of(sessions, message)

        @first.job(TOPIC, lease=LEASE)
        def begin(job: Job, message: Message) -> None:
            begun.set()
            wait_for("the stop is seen", lambda: job.cancelled)
            job.save({"page": 3})

        async with running(first):
            await asyncio.to_thread(begun.wait)
        assert job_of(url) == RELEASED
        assert receipts(url) == 0
        second = consumer_of(sessions, message)

        @second.job(TOPIC, lease=LEASE)
        def resume(job: Job, message: Message) -> None:
            with job.finish() as session:
                session.execute(EFFECT, {"what": f"from page {job.checkpoint['page']}"})

        async with running(second) as events:
            await events.wait_for(MessageHandled)
    assert effects(url) == ["from page 3"]


async def test_a_coroutine_cancelled_by_a_stop_that_returns_has_not_finished(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    begun = asyncio.Event()
    consumer = consumer_of(sessions, Message(TOPIC, b""))

    @consumer.job(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await job.save({"page": 3})

    async with running(consumer):
        await begun.wait()
    assert job_of(url) == RELEASED
    assert receipts(url) == 0


async def test_a_function_that_sees_the_cancel_and_returns_is_cancelled(
    url: str,
) -> None:
    message, begun = Message(TOPIC, b""), threading.Event()
    with sessions_of(url) as sessions:
        consumer = consumer_of(sessions, message)

        @consumer.job(TOPIC, lease=LEASE)
        def render(job: Job, message: Message) -> None:
            begun.set()
            wait_for("the cancel is seen", lambda: job.cancelled)

        async with running(consumer) as events:
            await asyncio.to_thread(begun.wait)
            assert await cancel(url, message, "--reason", "wrong customer") == 0
            await events.wait_for(MessageCancelled)
    assert job_of(url) == ["cancelled", 1, 1, "wrong customer", True, None]
    assert receipts(url) == 0


async def test_a_cancelled_coroutine_that_returns_is_cancelled(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message, begun = Message(TOPIC, b""), asyncio.Event()
    consumer = consumer_of(sessions, message)

    @consumer.job(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    async with running(consumer) as events:
        await begun.wait()
        assert await cancel(url, message, "--reason", "wrong customer") == 0
        await events.wait_for(MessageCancelled)
    assert job_of(url)[:4] == ["cancelled", 1, 1, "wrong customer"]
    assert receipts(url) == 0


async def test_a_function_that_never_checks_for_a_cancel_has_finished(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, is_told = threading.Event(), threading.Event()

    def end(job: AnyJob, overrun: HandlerTimeoutError | None = None) -> None:
        AnyJob.end(job, overrun)
        is_told.set()

    monkeypatch.setattr(Job, "end", end)
    with sessions_of(url) as sessions:
        consumer = consumer_of(sessions, Message(TOPIC, b""))

        @consumer.job(TOPIC, lease=LEASE)
        def render(job: Job, message: Message) -> None:
            begun.set()
            assert not job.cancelled
            is_told.wait()

        async with running(consumer) as events:
            await asyncio.to_thread(begun.wait)
            consumer.stop()
            await events.wait_for(MessageHandled)
    assert job_of(url)[0] == "success"
    assert receipts(url) == 1


async def test_a_function_that_sees_the_stop_can_still_finish(url: str) -> None:
    begun = threading.Event()
    with sessions_of(url) as sessions:
        consumer = consumer_of(sessions, Message(TOPIC, b""))

        @consumer.job(TOPIC, lease=LEASE)
        def render(job: Job, message: Message) -> None:
            begun.set()
            wait_for("the stop is seen", lambda: job.cancelled)
            with job.finish() as session:
                session.execute(EFFECT, {"what": "done"})

        async with running(consumer):
            await asyncio.to_thread(begun.wait)
    assert effects(url) == ["done"]
    assert job_of(url)[0] == "success"


async def test_a_cancelled_coroutine_can_still_finish(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    begun = asyncio.Event()
    consumer = consumer_of(sessions, Message(TOPIC, b""))

    @consumer.job(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            async with job.finish() as session:
                await session.execute(EFFECT, {"what": "done"})

    async with running(consumer):
        await begun.wait()
    assert effects(url) == ["done"]
    assert job_of(url)[0] == "success"


async def test_a_function_that_notices_its_time_limit_and_returns_is_timed_out(
    url: str,
) -> None:
    with sessions_of(url) as sessions:
        consumer = consumer_of(sessions, Message(TOPIC, b""))

        @consumer.job(TOPIC, lease=LEASE, time_limit=timedelta(milliseconds=20))
        def render(job: Job, message: Message) -> None:
            wait_for("its time is over", lambda: job.cancelled)

        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered)
    assert job_of(url)[:2] == ["timed_out", 3]
    assert receipts(url) == 0


async def test_a_checkpoint_in_progress_at_a_stop_is_saved(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    jobs: list[AsyncJob] = []
    begun, locked = asyncio.Event(), asyncio.Event()
    consumer = consumer_of(sessions, Message(TOPIC, b""))

    @consumer.job(TOPIC, lease=timedelta(seconds=30))
    async def render(job: AsyncJob, message: Message) -> None:
        jobs.append(job)
        begun.set()
        await locked.wait()
        await job.save({"page": 3})

    async with running(consumer):
        await begun.wait()
        with psycopg.connect(conninfo(url)) as connection:
            connection.execute("SELECT FROM inbox.job FOR UPDATE")
            locked.set()
            await asyncio.to_thread(
                wait_for, "it waits for the lock", lambda: execute(url, WAITING)
            )
            consumer.stop()
            await asyncio.to_thread(
                wait_for, "it is to stop", lambda: jobs[0].cancelled
            )
    assert job_of(url) == RELEASED


@pytest.mark.parametrize("is_caught", [False, True], ids=["raises", "caught"])
async def test_a_function_that_finishes_after_its_time_limit_has_failed(
    url: str, is_caught: bool
) -> None:
    with sessions_of(url) as sessions:
        consumer = consumer_of(sessions, Message(TOPIC, b""))

        @consumer.job(TOPIC, lease=LEASE, time_limit=timedelta(milliseconds=20))
        def render(job: Job, message: Message) -> None:
            caught = HandlerTimeoutError if is_caught else JobLostError
            with suppress(caught), job.finish() as session:
                session.execute(EFFECT, {"what": "late"})
                wait_for("the time is over", lambda: job.cancelled)

        async with running(consumer) as events:
            (given_up,) = await events.wait_for(MessageDeadLettered)
    assert "took longer than its time limit" in given_up.reason
    assert job_of(url)[:2] == ["timed_out", 3]
    assert effects(url) == []
    assert receipts(url) == 0


async def test_a_function_that_starts_to_finish_after_its_time_limit_has_failed(
    url: str,
) -> None:
    with sessions_of(url) as sessions:
        consumer = consumer_of(sessions, Message(TOPIC, b""))

        @consumer.job(TOPIC, lease=LEASE, time_limit=timedelta(milliseconds=20))
        def render(job: Job, message: Message) -> None:
            wait_for("the time is over", lambda: job.cancelled)
            job.save({"attempt": job.attempts})
            with job.finish() as session:
                session.execute(EFFECT, {"what": "late"})

        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered)
    assert job_of(url)[:2] == ["timed_out", 3]
    assert job_of(url)[-1] == {"attempt": 3}
    assert effects(url) == []
    assert receipts(url) == 0


async def test_a_coroutine_that_finishes_after_its_time_limit_has_failed(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = consumer_of(sessions, Message(TOPIC, b""))

    @consumer.job(TOPIC, lease=LEASE, time_limit=timedelta(milliseconds=20))
    async def render(job: AsyncJob, message: Message) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        async with job.finish() as session:
            await session.execute(EFFECT, {"what": "late"})

    async with running(consumer) as events:
        await events.wait_for(MessageDeadLettered)
    assert job_of(url)[:2] == ["timed_out", 3]
    assert effects(url) == []
    assert receipts(url) == 0


@pytest.mark.parametrize("how", ["finish", "return"])
async def test_a_time_limit_that_passes_after_a_stop_still_fails_the_attempt(
    url: str, how: str
) -> None:
    begun = threading.Event()
    overruns: list[HandlerTimeoutError] = []

    with sessions_of(url) as sessions:
        consumer = consumer_of(sessions, Message(TOPIC, b""))

        @consumer.job(TOPIC, lease=LEASE, time_limit=timedelta(seconds=1))
        def render(job: Job, message: Message) -> None:
            begun.set()
            threading.Event().wait(2)
            if how == "return":
                return
            try:
                with job.finish() as session:
                    session.execute(EFFECT, {"what": "late"})
            except HandlerTimeoutError as error:
                overruns.append(error)

        async with running(consumer) as events:
            await asyncio.to_thread(begun.wait)
        assert events.of(MessageHandled) == []
    assert len(overruns) == (how == "finish")
    state, attempts, *_ = job_of(url)
    assert (state, attempts) == ("queued", 1)
    assert (effects(url), receipts(url)) == ([], 0)
