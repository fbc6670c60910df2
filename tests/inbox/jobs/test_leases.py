"""The lease of a job is renewed, whatever handlers and database do."""

import asyncio
import threading
from datetime import timedelta
from typing import Any, Final

import psycopg
import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, sessionmaker
from typing_extensions import override

from inbox.events import HandlerFailed, MessageCancelled, MessageHandled
from inbox.jobs.job import AsyncJob, Job
from outbox.dead_letters.retry import RetryCounts
from outbox.postgres.connection import conninfo, sqlalchemy_url
from pillarbox import Message
from tests.fixtures.consumers import async_sessions_of, running, sessions_of
from tests.fixtures.dead_letters import give_up, retry
from tests.fixtures.jobs import LEASE, TOPIC, cancel, consumer_of, job_of, receipts
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

pytestmark = pytest.mark.timeout(180)

ERRORS: Final = [ConnectionRefusedError("refused"), PoolTimeoutError("no room")]


def wait_for_renewal(url: str) -> None:
    """Wait until the lease is valid for longer than it was at first."""
    query = "SELECT lease_until > started_at + %s + interval '0.2 s' FROM inbox.job"
    wait_for("the lease is renewed", lambda: execute(url, query, [LEASE]) == [(True,)])


class Outage:
    """Simulates an outage of the database, and counts the attempts that meet it."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.is_on = False
        self.found = threading.Semaphore(0)

    def check(self) -> None:
        """Raise the error during an outage."""
        if self.is_on:
            self.found.release()
            raise self.error

    async def find(self, times: int) -> None:
        """Be unavailable until `times` attempts have failed."""
        self.is_on = True
        for _ in range(times):
            await asyncio.to_thread(self.found.acquire)
        self.is_on = False

    def async_sessions(self, url: str) -> async_sessionmaker[AsyncSession]:
        """Return sessions for coroutines, which fail during an outage."""
        return _Checked(self, create_async_engine(sqlalchemy_url(url)))

    def sessions(self, url: str) -> sessionmaker[Session]:
        """Return sessions for plain functions, which fail during an outage."""
        return _CheckedSync(self, create_engine(sqlalchemy_url(url)))


class _Checked(async_sessionmaker[AsyncSession]):
    def __init__(self, outage: Outage, engine: AsyncEngine) -> None:
        super().__init__(engine)
        self._outage = outage

    @override
    def __call__(self, **changes: Any) -> AsyncSession:
        self._outage.check()
        return super().__call__(**changes)


class _CheckedSync(sessionmaker[Session]):
    def __init__(self, outage: Outage, engine: Engine) -> None:
        super().__init__(engine)
        self._outage = outage

    @override
    def __call__(self, **changes: Any) -> Session:
        self._outage.check()
        return super().__call__(**changes)


async def test_a_lease_is_renewed_while_handlers_occupy_all_threads(
    database_url: str,
) -> None:
    with sessions_of(database_url) as sessions:
        consumer = consumer_of(sessions, Message(TOPIC, b""), max_in_flight=1)

        @consumer.job(TOPIC, lease=LEASE)
        def render(job: Job, message: Message) -> None:
            wait_for_renewal(database_url)

        async with running(consumer) as events:
            await events.wait_for(MessageHandled)
    assert job_of(database_url)[:3] == ["success", 1, 1]


async def test_a_cancel_arrives_while_handlers_occupy_all_threads(
    database_url: str,
) -> None:
    message, begun = Message(TOPIC, b""), threading.Event()
    with sessions_of(database_url) as sessions:
        consumer = consumer_of(sessions, message, max_in_flight=1)

        @consumer.job(TOPIC, lease=LEASE)
        def render(job: Job, message: Message) -> None:
            begun.set()
            wait_for("the cancel arrives", lambda: job.cancelled)
            raise InterruptedError

        async with running(consumer) as events:
            await asyncio.to_thread(begun.wait)
            assert await cancel(database_url, message) == 0
            await events.wait_for(MessageCancelled)
    assert job_of(database_url)[0] == "cancelled"


async def test_a_lease_is_renewed_during_the_retry_of_a_dead_letter(
    database_url: str,
) -> None:
    with sessions_of(database_url) as sessions:
        consumer = consumer_of(sessions)

        @consumer.job(TOPIC, lease=LEASE)
        def render(job: Job, message: Message) -> None:
            wait_for_renewal(database_url)

        message = Message(TOPIC, b"")
        give_up(database_url, message, schema="inbox", origin="consumer:reports")
        tally = await retry(consumer.retrier())
    assert tally == RetryCounts(succeeded=1)
    assert job_of(database_url)[:2] == ["success", 1]


async def test_a_stop_releases_the_job_without_waiting_for_the_thread(
    database_url: str,
) -> None:
    begun, has_stopped = threading.Event(), threading.Event()
    with sessions_of(database_url) as sessions:
        consumer = consumer_of(
            sessions,
            Message(TOPIC, b""),
            max_in_flight=1,
            drain=timedelta(milliseconds=50),
        )

        @consumer.job(TOPIC, lease=LEASE)
        def render(job: Job, message: Message) -> None:
            begun.set()
            has_stopped.wait()

        try:
            async with running(consumer):
                await asyncio.to_thread(begun.wait)
            assert job_of(database_url)[:2] == ["queued", 0]
        finally:
            has_stopped.set()


async def test_a_handler_that_ignores_the_first_cancellation_ends_with_the_drain(
    database_url: str,
) -> None:
    begun, seen = asyncio.Event(), []
    async with async_sessions_of(database_url) as sessions:
        consumer = consumer_of(
            sessions, Message(TOPIC, b""), drain=timedelta(milliseconds=50)
        )

        @consumer.job(TOPIC, lease=LEASE)
        async def render(job: AsyncJob, message: Message) -> None:
            begun.set()
            for wait in ("first", "second"):
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    seen.append(wait)
            raise InterruptedError

        async with running(consumer):
            await begun.wait()
    assert seen == ["first", "second"]
    assert job_of(database_url)[:2] == ["queued", 0]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_a_failed_heartbeat_is_repeated_after_any_error(
    error: Exception, database_url: str
) -> None:
    outage, calls = Outage(error), []
    sessions = outage.async_sessions(database_url)
    consumer = consumer_of(sessions, Message(TOPIC, b""))

    @consumer.job(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        calls.append(job.attempts)
        await outage.find(1)
        async with job.transaction():
            pass

    async with running(consumer) as events:
        await events.wait_for(MessageHandled)
    await sessions.kw["bind"].dispose()
    assert calls == [1]
    assert events.of(HandlerFailed) == []
    assert job_of(database_url)[:3] == ["success", 1, 1]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_the_outcome_is_recorded_when_the_database_is_back(
    error: Exception, database_url: str
) -> None:
    outage, calls = Outage(error), []
    sessions = outage.sessions(database_url)
    consumer = consumer_of(sessions, Message(TOPIC, b""))
    loop = asyncio.get_running_loop()

    # With this lease, the first heartbeat is due in a minute.
    @consumer.job(TOPIC, lease=timedelta(hours=1))
    def render(job: Job, message: Message) -> None:
        calls.append(job.attempts)
        outage.is_on = True
        asyncio.run_coroutine_threadsafe(outage.find(2), loop)

    async with running(consumer) as events:
        await events.wait_for(MessageHandled)
    sessions.kw["bind"].dispose()
    assert calls == [1]
    assert job_of(database_url)[:3] == ["success", 1, 1]
    assert receipts(database_url) == 1


async def test_a_stopped_consumer_leaves_no_connection_in_use(
    database_url: str,
) -> None:
    with (
        sessions_of(database_url) as sessions,
        psycopg.connect(conninfo(database_url)) as elsewhere,
    ):
        consumer = consumer_of(sessions)

        @consumer.job(TOPIC, lease=LEASE)
        def render(job: Job, message: Message) -> None: ...

        # Its first own transaction has to wait for this lock.
        elsewhere.execute("LOCK inbox.job IN SHARE MODE")
        work = asyncio.create_task(consumer.run())
        waiting = "SELECT true FROM pg_locks WHERE NOT granted"
        await asyncio.to_thread(
            wait_for, "a thread waits", lambda: execute(database_url, waiting)
        )
        consumer.stop()
        await asyncio.wait({work}, timeout=1)
        assert not work.done(), "it has stopped, and its thread goes on"
        elsewhere.rollback()
        await work
        assert sessions.kw["bind"].pool.checkedout() == 0
