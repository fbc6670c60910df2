"""The outcome when a long handler is asked to stop and returns, or continues."""

import asyncio
import threading
from datetime import timedelta
from typing import Final

import psycopg
import pytest

from pillarbox import Message
from pillarbox.inbox.errors import HandlerTimeoutError
from pillarbox.inbox.events import MessageCancelled, MessageDeadLettered, MessageHandled
from pillarbox.inbox.jobs.job import AnyJob, AsyncJob, Job
from pillarbox.outbox.postgres.connection import conninfo
from tests.fixtures.consumers import async_sessions_of, running
from tests.fixtures.effects import EFFECT, effects, receipts
from tests.fixtures.jobs import LEASE, TOPIC, cancel, consumer_of, job_of, running_job
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

pytestmark = pytest.mark.timeout(180)

RELEASED: Final = ["queued", 0, 1, None, False, {"page": 3}]
BRIEFLY: Final = timedelta(milliseconds=20)
WAITING: Final = (
    "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    " AND datname = current_database()"
)


class Told:
    """A long handler that saves a checkpoint when it is asked to stop.

    Then it returns, or finishes its job.
    """

    def __init__(self, *, finishes: bool = False) -> None:
        self.begun = threading.Event()
        self._finishes = finishes

    def function(self, job: Job, message: Message) -> None:
        self.begun.set()
        wait_for("it is asked to stop", lambda: job.cancelled)
        job.save({"page": 3})
        if self._finishes:
            with job.finish() as session:
                session.execute(EFFECT, {"what": "done"})

    async def coroutine(self, job: AsyncJob, message: Message) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await job.save({"page": 3})
            if not self._finishes:
                return
            async with job.finish() as session:
                await session.execute(EFFECT, {"what": "done"})
            raise


KINDS = pytest.mark.parametrize("kind", ["function", "coroutine"])


@KINDS
async def test_a_handler_that_returns_because_of_a_stop_has_not_finished(
    kind: str, url: str
) -> None:
    told = Told()
    async with running_job(url, Message(TOPIC, b""), getattr(told, kind)):
        await asyncio.to_thread(told.begun.wait)
    assert job_of(url) == RELEASED
    assert receipts(url) == 0


@KINDS
async def test_a_handler_that_returns_because_of_a_cancel_is_cancelled(
    kind: str, url: str
) -> None:
    message, told = Message(TOPIC, b""), Told()
    async with running_job(url, message, getattr(told, kind)) as events:
        await asyncio.to_thread(told.begun.wait)
        assert await cancel(url, message, "--reason", "wrong customer") == 0
        await events.wait_for(MessageCancelled)
    assert job_of(url) == ["cancelled", 1, 1, "wrong customer", True, {"page": 3}]
    assert receipts(url) == 0


@KINDS
async def test_a_handler_that_is_asked_to_stop_can_still_finish(
    kind: str, url: str
) -> None:
    told = Told(finishes=True)
    async with running_job(url, Message(TOPIC, b""), getattr(told, kind)):
        await asyncio.to_thread(told.begun.wait)
    assert effects(url) == ["done"]
    assert job_of(url)[0] == "success"


@KINDS
@pytest.mark.parametrize("finishes", [False, True], ids=["returns", "finishes"])
async def test_a_handler_that_ends_after_its_time_limit_is_timed_out(
    kind: str, finishes: bool, url: str
) -> None:
    handler = getattr(Told(finishes=finishes), kind)
    async with running_job(
        url, Message(TOPIC, b""), handler, time_limit=BRIEFLY
    ) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
    assert "exceeded its time limit" in given_up.reason
    # A checkpoint can be saved even then.
    assert job_of(url) == ["timed_out", 3, 3, given_up.reason, True, {"page": 3}]
    assert (effects(url), receipts(url)) == ([], 0)


async def test_a_function_that_never_checks_for_a_cancel_has_finished(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, is_told = threading.Event(), threading.Event()

    def end(job: AnyJob, overrun: HandlerTimeoutError | None = None) -> None:
        AnyJob.end(job, overrun)
        is_told.set()

    def render(job: Job, message: Message) -> None:
        begun.set()
        assert not job.cancelled
        is_told.wait()

    monkeypatch.setattr(Job, "end", end)
    async with running_job(url, Message(TOPIC, b""), render):
        await asyncio.to_thread(begun.wait)
    assert job_of(url)[0] == "success"
    assert receipts(url) == 1


async def test_a_checkpoint_in_progress_at_a_stop_is_saved(url: str) -> None:
    jobs: list[AsyncJob] = []
    begun, locked = asyncio.Event(), asyncio.Event()

    async def render(job: AsyncJob, message: Message) -> None:
        jobs.append(job)
        begun.set()
        await locked.wait()
        await job.save({"page": 3})

    async with async_sessions_of(url) as sessions:
        consumer = consumer_of(sessions, Message(TOPIC, b""))
        consumer.job(TOPIC, lease=LEASE)(render)
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


async def test_a_function_whose_time_limit_passes_while_it_finishes_has_failed(
    url: str,
) -> None:
    def render(job: Job, message: Message) -> None:
        with job.finish() as session:
            session.execute(EFFECT, {"what": "late"})
            wait_for("the time is over", lambda: job.cancelled)

    message = Message(TOPIC, b"")
    async with running_job(url, message, render, time_limit=BRIEFLY) as events:
        await events.wait_for(MessageDeadLettered)
    assert job_of(url)[:2] == ["timed_out", 3]
    assert (effects(url), receipts(url)) == ([], 0)


@pytest.mark.parametrize("how", ["finish", "return"])
async def test_a_time_limit_that_passes_after_a_stop_still_fails_the_attempt(
    url: str, how: str
) -> None:
    begun = threading.Event()
    overruns: list[HandlerTimeoutError] = []

    def render(job: Job, message: Message) -> None:
        begun.set()
        threading.Event().wait(1.5)
        if how == "return":
            return
        try:
            with job.finish() as session:
                session.execute(EFFECT, {"what": "late"})
        except HandlerTimeoutError as error:
            overruns.append(error)

    limit = timedelta(seconds=1)
    async with running_job(
        url, Message(TOPIC, b""), render, time_limit=limit
    ) as events:
        await asyncio.to_thread(begun.wait)
    assert events.of(MessageHandled) == []
    assert len(overruns) == (how == "finish")
    assert job_of(url)[:2] == ["queued", 1]
    assert (effects(url), receipts(url)) == ([], 0)
