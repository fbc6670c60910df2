"""The lease of a job is renewed, whatever handlers and database do."""

import asyncio
import threading
from collections import Counter
from datetime import timedelta
from typing import Any, Final

import psycopg
import pytest
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from pillarbox import Message
from pillarbox.inbox.errors import JobLostError
from pillarbox.inbox.events import HandlerFailed, MessageHandled
from pillarbox.inbox.jobs.job import AsyncJob, Job
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.postgres.connection import conninfo
from tests.fixtures.consumers import (
    async_sessions_of,
    consuming,
    running,
    sessions_of,
)
from tests.fixtures.dead_letters import give_up, retry
from tests.fixtures.effects import EFFECTS, effects, receipts
from tests.fixtures.jobs import (
    LEASE,
    TOPIC,
    consumer_of,
    job_of,
    note,
    running_job,
)
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

pytestmark = pytest.mark.timeout(180)

ERRORS: Final = pytest.mark.parametrize(
    "error",
    [ConnectionRefusedError("refused"), PoolTimeoutError("no room")],
    ids=lambda error: type(error).__name__,
)
ALONE: Final[dict[str, Any]] = {"max_in_flight": 1, "name": "reports"}
BRIEF_DRAIN: Final = timedelta(milliseconds=50)


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

    async def find(self, times: int) -> None:
        """Be unavailable until `times` attempts have failed."""
        self.is_on = True
        for _ in range(times):
            await asyncio.to_thread(self.found.acquire)
        self.is_on = False

    def affect(self, sessions: Any) -> None:
        """Let no session be opened during an outage."""
        make = sessions.class_

        def open_session(**settings: Any) -> Any:
            if self.is_on:
                self.found.release()
                raise self.error
            return make(**settings)

        sessions.class_ = open_session


async def test_a_lease_is_renewed_while_handlers_occupy_all_threads(
    database_url: str,
) -> None:
    def render(job: Job, message: Message) -> None:
        wait_for_renewal(database_url)

    source = MemorySource(Message(TOPIC, b""))
    terms = {"lease": LEASE}
    async with consuming(database_url, source, render, terms, **ALONE) as events:
        await events.wait_for(MessageHandled)
    assert job_of(database_url)[:3] == ["success", 1, 1]


async def test_a_lease_is_renewed_during_the_retry_of_a_dead_letter(
    database_url: str,
) -> None:
    def render(job: Job, message: Message) -> None:
        wait_for_renewal(database_url)

    give_up(
        database_url, Message(TOPIC, b""), schema="inbox", origin="consumer:reports"
    )
    with sessions_of(database_url) as sessions:
        consumer = consumer_of(sessions)
        consumer.job(TOPIC, lease=LEASE)(render)
        assert await retry(consumer.retrier()) == Counter(succeeded=1)
    assert job_of(database_url)[:2] == ["success", 1]


async def test_a_stop_releases_the_job_without_waiting_for_the_thread(
    database_url: str,
) -> None:
    begun, has_stopped = threading.Event(), threading.Event()

    def render(job: Job, message: Message) -> None:
        begun.set()
        has_stopped.wait()

    message = Message(TOPIC, b"")
    try:
        async with running_job(database_url, message, render, drain=BRIEF_DRAIN):
            await asyncio.to_thread(begun.wait)
        assert job_of(database_url)[:2] == ["queued", 0]
    finally:
        has_stopped.set()


async def test_a_handler_that_ignores_the_first_cancellation_ends_with_the_drain(
    database_url: str,
) -> None:
    begun, seen = asyncio.Event(), []

    async def render(job: AsyncJob, message: Message) -> None:
        begun.set()
        for wait in ("first", "second"):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append(wait)
        raise InterruptedError

    message = Message(TOPIC, b"")
    async with running_job(database_url, message, render, drain=BRIEF_DRAIN):
        await begun.wait()
    assert seen == ["first", "second"]
    assert job_of(database_url)[:2] == ["queued", 0]


@ERRORS
async def test_a_failed_heartbeat_is_repeated_after_any_error(
    error: Exception, database_url: str
) -> None:
    outage, calls = Outage(error), []

    async def render(job: AsyncJob, message: Message) -> None:
        calls.append(job.attempts)
        await outage.find(1)
        async with job.transaction():
            pass

    async with async_sessions_of(database_url) as sessions:
        outage.affect(sessions)
        consumer = consumer_of(sessions, Message(TOPIC, b""))
        consumer.job(TOPIC, lease=LEASE)(render)
        async with running(consumer) as events:
            await events.wait_for(MessageHandled)
    assert calls == [1]
    assert events.of(HandlerFailed) == []
    assert job_of(database_url)[:3] == ["success", 1, 1]


@ERRORS
async def test_the_outcome_is_recorded_when_the_database_is_back(
    error: Exception, database_url: str
) -> None:
    outage, calls = Outage(error), []
    loop = asyncio.get_running_loop()

    def render(job: Job, message: Message) -> None:
        calls.append(job.attempts)
        outage.is_on = True
        asyncio.run_coroutine_threadsafe(outage.find(2), loop)

    with sessions_of(database_url) as sessions:
        outage.affect(sessions)
        consumer = consumer_of(sessions, Message(TOPIC, b""))
        # With this lease, the first heartbeat is due in a minute.
        consumer.job(TOPIC, lease=timedelta(hours=1))(render)
        async with running(consumer) as events:
            await events.wait_for(MessageHandled)
    assert calls == [1]
    assert job_of(database_url)[:3] == ["success", 1, 1]
    assert receipts(database_url) == 1


async def test_a_stopped_consumer_leaves_no_connection_in_use(
    database_url: str,
) -> None:
    def render(job: Job, message: Message) -> None: ...

    with (
        sessions_of(database_url) as sessions,
        psycopg.connect(conninfo(database_url)) as elsewhere,
    ):
        consumer = consumer_of(sessions, Message(TOPIC, b""))
        consumer.job(TOPIC, lease=LEASE)(render)
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


LOST: Final = {
    "its last transaction": "lease_until = lease_until - interval '1 second'",
    "its start, and another process began": "started_at = started_at + interval '1 ms',"
    " lease_until = lease_until + interval '1 minute'",
}


@pytest.mark.parametrize("change", LOST.values(), ids=LOST)
async def test_a_job_of_which_a_failover_has_lost_a_transaction_is_started_again(
    change: str, database_url: str
) -> None:
    starts: list[str] = []
    execute(database_url, EFFECTS)

    async def render(job: AsyncJob, message: Message) -> None:
        starts.append("one")
        await note(job, "one")
        if len(starts) == 1:
            execute(database_url, "DELETE FROM effect")
            execute(database_url, f"UPDATE inbox.job SET {change}")
            with pytest.raises(JobLostError):
                await note(job, "two")
            with pytest.raises(JobLostError):
                await job.save(1)
            with pytest.raises(JobLostError):
                async with job.finish():
                    pass
            execute(database_url, "UPDATE inbox.job SET lease_until = now()")
            return
        receipts = execute(database_url, "SELECT count(*) FROM inbox.receipt")
        assert receipts == [(0,)], "it would make the job look handled"
        await note(job, "two")

    async with running_job(database_url, Message(TOPIC, b""), render) as events:
        await events.wait_for(MessageHandled)
    assert effects(database_url) == ["one", "two"]
    assert job_of(database_url)[0] == "success"
