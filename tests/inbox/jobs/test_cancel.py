"""Jobs are listed, cancelled, or taken over by another process."""

import asyncio
import json

import pytest

from pillarbox import Message
from pillarbox.inbox.errors import JobLostError
from pillarbox.inbox.events import MessageCancelled, MessageHandled, RetryRequested
from pillarbox.inbox.jobs.job import AsyncJob
from pillarbox.outbox.cli.main import main
from tests.acceptance.relays import as_role
from tests.fixtures.effects import effects
from tests.fixtures.jobs import (
    TOPIC,
    add_job,
    cancel,
    job_of,
    note,
    running_job,
)
from tests.fixtures.sessions import execute


async def note_attempt(job: AsyncJob, message: Message) -> None:
    await note(job, f"attempt {job.attempts}")


@pytest.mark.parametrize("driver", ["psycopg async", "asyncpg"])
async def test_a_cancel_reaches_a_running_coroutine(url: str, driver: str) -> None:
    message, begun = Message(TOPIC, b""), asyncio.Event()

    async def render(job: AsyncJob, message: Message) -> None:
        await note(job, "begun")
        begun.set()
        await asyncio.Event().wait()

    async with running_job(url, message, render, driver=driver) as events:
        await begun.wait()
        assert await cancel(url, message) == 0
        await events.wait_for(MessageCancelled)
    assert effects(url) == ["begun"]
    assert job_of(url)[0] == "cancelled"
    assert await cancel(url, message) == 1


async def test_a_job_cancelled_before_it_arrives_never_starts(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = Message(TOPIC, b"")
    assert await cancel(url, message, "--consumer", "reports") == 0
    said = capsys.readouterr().err
    assert "pillarbox: consumer 'reports' has no job for this message yet" in said
    assert await asyncio.to_thread(main, ["jobs", "--database", url]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "state"
    assert "waiting" in line
    assert str(message.id) in line

    async with running_job(url, message, note_attempt) as events:
        await events.wait_for(MessageCancelled)
    assert effects(url) == []
    assert job_of(url)[:2] == ["cancelled", 0]


async def test_a_process_that_lost_the_lease_commits_nothing(url: str) -> None:
    lost: list[type[BaseException]] = []

    async def render(job: AsyncJob, message: Message) -> None:
        # As another process would while this one is frozen.
        execute(url, "UPDATE inbox.job SET lease = lease + 1, lease_until = now()")
        try:
            await note(job, "too late")
        except JobLostError as error:
            lost.append(type(error))
            raise

    async with running_job(url, Message(TOPIC, b""), render) as events:
        (event,) = await events.wait_for(RetryRequested)
    assert (lost, event.reason) == ([JobLostError], "the lease was lost")
    assert effects(url) == []


async def test_a_job_that_another_process_runs_is_waited_for(url: str) -> None:
    message = Message(TOPIC, b"")
    in_an_hour = "clock_timestamp() + interval '1 hour'"
    add_job(url, message, "in_progress", 1, lease_until=in_an_hour)
    async with running_job(url, message, note_attempt) as events:
        (event,) = await events.wait_for(RetryRequested)
    assert 3000 < event.seconds_until_retry < 3601

    execute(url, "UPDATE inbox.job SET lease_until = clock_timestamp()")
    async with running_job(url, message, note_attempt) as events:
        await events.wait_for(MessageHandled)
    assert effects(url) == ["attempt 2"]


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
    assert (
        "no consumer has a job with this id; if the message" in capsys.readouterr().err
    )

    add_job(url, message, "success", consumer="done", finished_at="now()")
    assert await cancel(url, message) == 1
    assert "of done has already ended: success" in capsys.readouterr().out

    add_job(url, message)
    assert await cancel(url, message) == 0
    said = capsys.readouterr()
    assert f"{message.id} of reports will be cancelled" in said.out
    assert said.err == ""

    add_job(url, message, consumer="prints")
    assert await cancel(url, message) == 2
    assert (
        "prints, reports each have a job with this id; choose"
        in capsys.readouterr().err
    )
    assert await cancel(url, message, "--consumer", "prints") == 0


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

    async with running_job(url, message, note_attempt) as events:
        await events.wait_for(MessageCancelled)
    assert effects(url) == []


async def test_a_cancelled_job_is_left_to_its_process_while_that_is_alive(
    url: str,
) -> None:
    alive = abandon(url, seconds_ago=-600)
    assert await cancel(url, alive) == 0
    assert job_of(url)[0] == "waiting"


def listed(
    url: str, capsys: pytest.CaptureFixture[str], *options: str
) -> list[tuple[str, str]]:
    monitor = as_role(url, "pillarbox_monitor")
    assert main(["jobs", "--json", "--database", monitor, *options]) == 0
    jobs = json.loads(capsys.readouterr().out)
    return sorted((job["state"], job["message_id"]) for job in jobs)


def test_jobs_are_listed_by_state_and_consumer(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, queued = (Message(TOPIC, b"") for _ in range(2))
    add_job(database_url, ended, "success", finished_at="now()")
    add_job(database_url, queued, "queued")

    assert listed(database_url, capsys) == [("queued", str(queued.id))]
    assert listed(database_url, capsys, "--state", "success") == [
        ("success", str(ended.id))
    ]
    assert listed(database_url, capsys, "--consumer", "billing") == []
    assert len(listed(database_url, capsys, "--state", "any")) == 2
    assert len(listed(database_url, capsys, "--state", "any", "--limit", "1")) == 1
