"""Long handlers are cancelled, taken over, timed out, or fail permanently."""

import asyncio
import json
import threading
from datetime import timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from inbox.errors import JobLostError
from inbox.events import (
    ConsumerStarted,
    MessageCancelled,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from inbox.jobs.job import AsyncJob, Job
from inbox.sources.memory import MemorySource
from outbox.cli.main import main
from outbox.errors import ConfigError
from pillarbox import Consumer, Message
from tests.fixtures.consumers import running, sessions_of
from tests.fixtures.jobs import (
    LEASE,
    TOPIC,
    cancel,
    consumer_of,
    effects,
    job_of,
    note,
)
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for


async def test_a_cancel_reaches_a_running_coroutine(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message, begun = Message(TOPIC, b""), asyncio.Event()
    consumer = consumer_of(sessions, message)

    @consumer.job(TOPIC, lease=LEASE)
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

        @consumer.job(TOPIC, lease=LEASE)
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


async def test_a_job_cancelled_before_it_arrives_never_starts(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message = Message(TOPIC, b"")
    assert await cancel(url, message, "--consumer", "reports") == 0
    consumer = consumer_of(sessions, message)

    @consumer.job(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        await note(job, "begun")

    async with running(consumer) as events:
        await events.wait_for(MessageCancelled)
    assert effects(url) == []
    assert job_of(url)[:2] == ["cancelled", 0]


async def test_a_process_that_lost_the_lease_commits_nothing(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = consumer_of(sessions, Message(TOPIC, b""))
    lost: list[type[BaseException]] = []

    # The lease is renewed after 10 s, so the handler's own statement finds out before.
    @consumer.job(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        # As another process would while this one is frozen.
        execute(url, "UPDATE inbox.job SET lease = lease + 1, lease_until = now()")
        try:
            await note(job, "too late")
        except JobLostError as error:
            lost.append(type(error))
            raise

    async with running(consumer) as events:
        (event,) = await events.wait_for(RetryRequested)
    assert (lost, event.reason) == ([JobLostError], "the lease was lost")
    assert effects(url) == []


async def test_a_job_that_another_process_runs_is_waited_for(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message, source = Message(TOPIC, b""), MemorySource()
    consumer = Consumer(source, sessions, name="reports")

    @consumer.job(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        await note(job, f"attempt {job.attempts}")

    async with running(consumer) as events:
        # Begin the lease as late as possible, so that it outlasts the delivery.
        await events.wait_for(ConsumerStarted)
        execute(
            url,
            "INSERT INTO inbox.job (message_id, message_at, consumer, state,"
            " lease_until, lease, attempts)"
            f" VALUES ('{message.id}', inbox.moment_of('{message.id}'), 'reports',"
            " 'in_progress', clock_timestamp() + interval '3 seconds', 1, 1)",
        )
        source.add(message)
        await events.wait_for(RetryRequested)
        await events.wait_for(MessageHandled)
    assert effects(url) == ["attempt 2"]


async def test_a_slow_handler_is_timed_out(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = consumer_of(sessions, Message(TOPIC, b""))

    @consumer.job(TOPIC, lease=LEASE, time_limit=timedelta(milliseconds=20))
    async def render(job: AsyncJob, message: Message) -> None:
        await asyncio.Event().wait()

    async with running(consumer) as events:
        await events.wait_for(MessageDeadLettered)
    assert job_of(url)[:2] == ["timed_out", 3]


async def test_a_message_started_too_often_is_not_started_again(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message = Message(TOPIC, b"")
    execute(
        url,
        "INSERT INTO inbox.job (message_id, message_at, consumer, attempts)"
        f" VALUES ('{message.id}', inbox.moment_of('{message.id}'), 'reports', 3)",
    )
    consumer = consumer_of(sessions, message)

    @consumer.job(TOPIC, lease=LEASE)
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
    await cancel(url, message, "--consumer", "reports")
    capsys.readouterr()

    assert await asyncio.to_thread(main, ["jobs", "--database", url]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "state"
    assert "waiting" in line
    assert str(message.id) in line


@pytest.mark.parametrize("id", ["7", "00000000-0000-4000-8000-000000000000"])
def test_an_invalid_id_is_reported(
    id: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cancel", "--database", url, id]) == 2
    assert "isn't a UUIDv7" in capsys.readouterr().err


async def test_the_consumer_must_be_named_only_if_the_job_is_ambiguous(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = Message(TOPIC, b"")
    assert await cancel(url, message) == 2
    assert "no consumer has a job for it; if the message" in capsys.readouterr().err

    add_job(url, message, "done", finished=True)
    assert await cancel(url, message) == 1
    assert "of done has already ended: success" in capsys.readouterr().out

    add_job(url, message, "reports")
    assert await cancel(url, message) == 0
    said = capsys.readouterr()
    assert f"{message.id} of reports will be cancelled" in said.out
    assert said.err == ""

    add_job(url, message, "prints")
    assert await cancel(url, message) == 2
    assert "prints, reports have a job for it; choose" in capsys.readouterr().err
    assert await cancel(url, message, "--consumer", "prints") == 0


async def test_a_cancel_that_might_never_take_effect_prints_a_warning(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await cancel(url, Message(TOPIC, b""), "--consumer", "reprots") == 0
    said = capsys.readouterr().err
    assert "pillarbox: consumer 'reprots' has no job for it yet" in said


def add_job(
    url: str, message: Message, consumer: str, *, finished: bool = False
) -> None:
    outcome = "'success', now()" if finished else "'queued', NULL"
    execute(
        url,
        "INSERT INTO inbox.job (message_id, message_at, consumer, state, finished_at)"
        f" VALUES ('{message.id}', inbox.moment_of('{message.id}'), '{consumer}',"
        f" {outcome})",
    )


def test_a_lease_that_is_too_short_is_refused(url: str) -> None:
    with sessions_of(url) as sessions:
        consumer = consumer_of(sessions)
        with pytest.raises(ConfigError, match="must be at least 1s"):
            consumer.job(TOPIC, lease=timedelta(milliseconds=1))(print)


def abandon(url: str, *, seconds_ago: int) -> Message:
    """Insert a cancelled job as its process leaves it when it dies."""
    message = Message(TOPIC, b"")
    execute(
        url,
        "INSERT INTO inbox.job (message_id, message_at, consumer, topic, state, lease,"
        " attempts, worker, started_at, cancel_requested_at, lease_until) VALUES"
        f" ('{message.id}', inbox.moment_of('{message.id}'), 'reports', '{TOPIC}',"
        " 'waiting', 1, 1, 'node-3:1', now(), now(),"
        f" now() - interval '{seconds_ago} s')",
    )
    return message


def test_the_list_marks_a_cancelled_job_whose_process_died(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    abandon(url, seconds_ago=1)
    alive = abandon(url, seconds_ago=-600)

    assert main(["jobs", "--database", url]) == 0
    workers = [
        line.split(maxsplit=6)[6] for line in capsys.readouterr().out.splitlines()
    ]
    assert workers == ["worker", "node-3:1 (gone)", "node-3:1"]
    assert main(["jobs", "--database", url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [job["worker_is_gone"] for job in found] == [True, False]
    assert found[1]["message_id"] == str(alive.id)


async def test_a_cancel_ends_a_job_whose_process_died(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = abandon(url, seconds_ago=1)

    assert await cancel(url, message, "--reason", "wrong customer") == 0

    assert "is cancelled: its worker node-3:1 is gone" in capsys.readouterr().out
    assert job_of(url)[:5] == ["cancelled", 1, 1, "wrong customer", True]
    assert await cancel(url, message) == 1
    assert "has already ended: cancelled" in capsys.readouterr().out


async def test_a_cancel_leaves_a_job_to_its_process_while_it_is_alive(url: str) -> None:
    message = abandon(url, seconds_ago=-600)

    assert await cancel(url, message) == 0

    assert job_of(url)[0] == "waiting"


async def test_a_consumer_ends_cancelled_jobs_whose_process_died(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    abandon(url, seconds_ago=1)
    alive = abandon(url, seconds_ago=-600)
    consumer = consumer_of(sessions)

    @consumer.job(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None: ...

    query = "SELECT message_id FROM inbox.job WHERE state = 'waiting'"
    async with running(consumer):
        await asyncio.to_thread(
            wait_for,
            "the job has ended",
            lambda: execute(url, query) == [(alive.id,)],
        )


async def test_the_message_of_a_job_cancelled_after_its_process_died_never_starts(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message = abandon(url, seconds_ago=1)
    assert await cancel(url, message) == 0
    consumer = consumer_of(sessions, message)

    @consumer.job(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        await note(job, "begun")

    async with running(consumer) as events:
        await events.wait_for(MessageCancelled)
    assert effects(url) == []
