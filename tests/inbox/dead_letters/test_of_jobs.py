"""Dead letters of long handlers can be retried, cancelled and discarded at any time."""

import asyncio
from datetime import timedelta
from typing import Final

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from pillarbox import Consumer, Message, RetryLater
from pillarbox.inbox.dead_letters.retry import HandlerRetrier
from pillarbox.inbox.events import MessageCancelled
from pillarbox.inbox.jobs.job import AsyncJob
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.dead_letters.criteria import Criteria
from pillarbox.outbox.dead_letters.retry import Candidate, Outcome
from pillarbox.outbox.testing.events import RecordedEvents
from tests.fixtures.dead_letters import find, give_up, states
from tests.fixtures.effects import receipts
from tests.fixtures.jobs import LEASE, TOPIC, add_job, cancel, consumer_of, job_of
from tests.fixtures.sessions import execute

pytestmark = pytest.mark.timeout(180)

PENDING: Final = ("PENDING", 0, "refused")


class Slow:
    """A consumer whose long handler runs until `proceed` is set."""

    def __init__(self, sessions: async_sessionmaker[AsyncSession]) -> None:
        self.calls: list[AsyncJob] = []
        self.begun = asyncio.Event()
        self.proceed = asyncio.Event()
        self.consumer: Consumer = consumer_of(sessions)
        self.consumer.job(TOPIC, lease=LEASE)(self.render)

    async def render(self, job: AsyncJob, message: Message) -> None:
        self.calls.append(job)
        self.begun.set()
        await self.proceed.wait()


async def first_of(retrier: HandlerRetrier) -> Candidate:
    (candidate,) = await find(retrier, Criteria())
    return candidate


def add_letter(url: str, message: Message) -> None:
    give_up(url, message, schema="inbox", origin="consumer:reports")


async def discard(url: str, *options: str) -> int:
    which = ["--side=inbox", *options, "--reason=a mistake", "--database", url]
    return await asyncio.to_thread(main, ["dead-letters", "discard", *which])


def statuses_and_reasons(url: str) -> list[tuple[str, str]]:
    query = "SELECT status, discard_reason FROM inbox.dead_letter ORDER BY 1"
    return execute(url, query)


@pytest.mark.parametrize("why", ["wrong customer", "😀" * 4096], ids=len)
async def test_a_cancel_during_a_retry_discards_the_dead_letter(
    why: str, url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message, slow, events = Message(TOPIC, b""), Slow(sessions), RecordedEvents()
    add_letter(url, message)
    async with slow.consumer.retrier(notify=events) as retrier:
        candidate = await first_of(retrier)
        retrying = asyncio.create_task(retrier.retry(candidate))
        await slow.begun.wait()
        assert await cancel(url, message, "--reason", why) == 0
        assert await retrying is Outcome.SKIPPED
        assert await retrier.retry(candidate) is Outcome.SKIPPED
    reason = f"the job was cancelled: {why}"[:4096]
    assert statuses_and_reasons(url) == [("DISCARDED", reason)]
    assert states(url, "inbox") == [("DISCARDED", 0, "refused")]
    assert job_of(url)[0] == "cancelled"
    assert len(slow.calls) == 1
    assert [event.id for event in events.of(MessageCancelled)] == [message.id]


async def test_a_crash_between_cancel_and_discard_is_completed_by_the_next_retry(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message, slow = Message(TOPIC, b""), Slow(sessions)
    add_letter(url, message)
    assert await cancel(url, message, "--consumer", "reports") == 0
    async with slow.consumer.retrier() as retrier:
        assert await retrier.retry(await first_of(retrier)) is Outcome.SKIPPED
    assert statuses_and_reasons(url) == [("DISCARDED", "the job was cancelled")]
    assert slow.calls == []


async def test_a_discard_during_a_retry_is_refused(
    url: str,
    sessions: async_sessionmaker[AsyncSession],
    capsys: pytest.CaptureFixture[str],
) -> None:
    message, slow = Message(TOPIC, b""), Slow(sessions)
    add_letter(url, message)
    async with slow.consumer.retrier() as retrier:
        retrying = asyncio.create_task(retrier.retry(await first_of(retrier)))
        await slow.begun.wait()
        add_letter(url, Message(TOPIC, b""))
        assert await discard(url, "--topic=*") == 2
        said = capsys.readouterr().err
        assert "1 discarded, 1 not" in said
        assert f"pillarbox cancel {message.id} --consumer reports" in said
        slow.proceed.set()
        assert await retrying is Outcome.SUCCEEDED
    assert statuses_and_reasons(url) == [
        ("DISCARDED", "a mistake"),
        ("SUCCEEDED", None),
    ]
    assert receipts(url) == 2


@pytest.mark.parametrize("lease", ["NULL", "now() - interval '1 hour'"])
async def test_a_discard_ends_a_job_that_no_process_runs(lease: str, url: str) -> None:
    message = Message(TOPIC, b"")
    add_letter(url, message)
    add_job(url, message, lease_until=lease)
    assert await discard(url, "--topic=*") == 0
    reason = "its dead letter was discarded"
    assert job_of(url) == ["cancelled", 0, 0, reason, True, None]
    assert receipts(url) == 1


async def test_a_dead_letter_discarded_during_a_retry_stays_discarded(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    slow = Slow(sessions)
    add_letter(url, Message(TOPIC, b""))
    async with slow.consumer.retrier() as retrier:
        retrying = asyncio.create_task(retrier.retry(await first_of(retrier)))
        await slow.begun.wait()
        execute(
            url,
            "UPDATE inbox.dead_letter SET status = 'DISCARDED', discard_reason = 'no'",
        )
        slow.proceed.set()
        assert await retrying is Outcome.SKIPPED
    assert statuses_and_reasons(url) == [("DISCARDED", "no")]


async def test_of_two_concurrent_retries_one_is_skipped(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    slow = Slow(sessions)
    add_letter(url, Message(TOPIC, b""))
    async with slow.consumer.retrier() as one, slow.consumer.retrier() as other:
        candidate = await first_of(one)
        first = asyncio.create_task(one.retry(candidate))
        await slow.begun.wait()
        assert await other.retry(candidate) is Outcome.SKIPPED
        assert states(url, "inbox") == [PENDING]
        slow.proceed.set()
        assert await first is Outcome.SUCCEEDED
    assert len(slow.calls) == 1


async def test_a_stopped_retry_leaves_job_and_dead_letter_unchanged(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    slow = Slow(sessions)
    add_letter(url, Message(TOPIC, b""))
    async with slow.consumer.retrier() as retrier:
        candidate = await first_of(retrier)
        retrying = asyncio.create_task(retrier.retry(candidate))
        await slow.begun.wait()
        await slow.calls[0].save({"page": 3})
        retrying.cancel()
        await asyncio.wait({retrying})
        assert job_of(url)[:2] == ["failure", 0]
        assert states(url, "inbox") == [PENDING]

        slow.proceed.set()
        assert await retrier.retry(candidate) is Outcome.SUCCEEDED
    assert [job.attempts for job in slow.calls] == [1, 1]
    assert slow.calls[1].checkpoint == {"page": 3}


async def test_a_long_handler_that_raises_retry_later_leaves_no_job_open(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = consumer_of(sessions)

    @consumer.job(TOPIC, lease=LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        raise RetryLater(timedelta(days=1), "closed on Fridays")

    add_letter(url, Message(TOPIC, b""))
    async with consumer.retrier() as retrier:
        assert await retrier.retry(await first_of(retrier)) is Outcome.FAILED
    assert states(url, "inbox") == [("PENDING", 0, "closed on Fridays")]
    assert job_of(url)[:2] == ["failure", 0]
