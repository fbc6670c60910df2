"""What comes again is counted when it is started, and handled alone the next time."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from typing_extensions import override

from inbox import Consumer, RetryLater
from inbox.events import (
    DeliveriesReclaimed,
    DuplicateSkipped,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from inbox.source import Delivery
from inbox.sources.memory import MemorySource
from outbox import Message
from tests.fixtures.consumers import (
    NEVER,
    QUICK,
    async_sessions_of,
    id_of,
    numbered,
    running,
)
from tests.fixtures.relay import execute

STARTS = "SELECT message_id, starts FROM inbox.suspect ORDER BY message_id"
SUSPECT = """
INSERT INTO inbox.suspect (message_id, message_at, consumer, starts)
VALUES (%s, inbox.moment_of(%s), 'billing', %s)
"""


class Repeated:
    """A delivery that its source doesn't count, and maybe handed over before."""

    def __init__(self, delivery: Delivery, suspect: bool) -> None:
        self.message = delivery.message
        self.attempts = 0
        self.problem = delivery.problem
        self.suspect = suspect
        self.ack = delivery.ack
        self.nack = delivery.nack


class Forgetful(MemorySource):
    """A source that counts nothing; what it hands over it had handed over before."""

    suspect = True
    reclaimed = 0

    @override
    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        given = await super().receive(limit=limit)
        self.reclaimed += len(given)
        return [Repeated(delivery, self.suspect) for delivery in given]


class Fresh(Forgetful):
    """A source that counts nothing, and hands over everything for the first time."""

    suspect = False


def note_starts(url: str, id: UUID, starts: int) -> None:
    execute(url, SUSPECT, [id, id, starts])


def starts(url: str) -> dict[UUID, int]:
    return dict(execute(url, STARTS))


def letters(url: str) -> list[tuple[Any, ...]]:
    return execute(
        url, "SELECT message_id, attempts, error_reason FROM inbox.dead_letter"
    )


async def test_a_suspect_is_counted_while_it_is_handled(database_url: str) -> None:
    (message,) = numbered(1)
    seen: list[dict[UUID, int]] = []
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(Forgetful(message), sessions, name="billing")

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            seen.append(await asyncio.to_thread(starts, database_url))

        async with running(consumer) as events:
            await events.wait_for(MessageHandled)

    assert seen == [{message.id: 1}]
    assert starts(database_url) == {}


async def test_what_others_had_before_is_told(database_url: str) -> None:
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(Forgetful(*numbered(3)), sessions, name="billing")

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None: ...

        async with running(consumer) as events:
            await events.wait_for(MessageHandled, 3)

    assert [event.messages for event in events.of(DeliveriesReclaimed)] == [3]


async def test_what_comes_for_the_first_time_is_not_counted(database_url: str) -> None:
    seen: list[dict[UUID, int]] = []
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(Fresh(*numbered(1)), sessions, name="billing")

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            seen.append(await asyncio.to_thread(starts, database_url))

        async with running(consumer) as events:
            await events.wait_for(MessageHandled)

    assert seen == [{}]


async def test_what_was_started_before_is_handled_alone(database_url: str) -> None:
    messages = numbered(12, keys=12)
    known = messages[5].id
    note_starts(database_url, known, 1)
    at_work: set[UUID] = set()
    beside: dict[UUID, set[UUID]] = {message.id: set() for message in messages}
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(Forgetful(*messages), sessions, name="billing")

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            at_work.add(message.id)
            await session.execute(text("SELECT pg_sleep(0.05)"))
            for id in at_work:
                beside[id] |= at_work
            at_work.remove(message.id)

        async with running(consumer) as events:
            await events.wait_for(MessageHandled, len(messages))

    assert beside[known] == {known}
    assert max(len(others) for others in beside.values()) > 1
    assert starts(database_url) == {}


async def test_what_was_started_too_often_is_given_up_unstarted(
    database_url: str,
) -> None:
    (message,) = numbered(1)
    note_starts(database_url, message.id, 3)
    called: list[Message] = []
    async with async_sessions_of(database_url) as sessions:
        source = Forgetful(message)
        consumer = Consumer(source, sessions, name="billing", retry=QUICK)

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            called.append(message)

        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered)

    reason = "was started 3 times and never came to an end"
    assert letters(database_url) == [(str(message.id), 3, reason)]
    assert (called, source.acked, starts(database_url)) == ([], [message], {})


async def test_what_was_started_too_often_but_handled_is_acked(
    database_url: str,
) -> None:
    (message,) = numbered(1)
    note_starts(database_url, message.id, 3)
    execute(
        database_url,
        "INSERT INTO inbox.receipt (message_id, message_at, consumer)"
        " VALUES (%s, inbox.moment_of(%s), 'billing')",
        [message.id, message.id],
    )
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(Forgetful(message), sessions, name="billing", retry=QUICK)

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            raise AssertionError

        async with running(consumer) as events:
            await events.wait_for(DuplicateSkipped)

    assert (letters(database_url), starts(database_url)) == ([], {})


async def test_failures_go_on_from_the_starts_that_were_counted(
    database_url: str,
) -> None:
    (message,) = numbered(1)
    note_starts(database_url, message.id, 1)
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(Forgetful(message), sessions, name="billing", retry=QUICK)

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            raise ValueError("no")

        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered)

    assert [event.attempts for event in events.of(HandlerFailed)] == [2]
    assert letters(database_url) == [(str(message.id), 3, "ValueError: no")]
    assert starts(database_url) == {}


async def test_a_request_to_come_later_counts_no_start(database_url: str) -> None:
    (message,) = numbered(1)
    note_starts(database_url, message.id, 1)
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(Forgetful(message), sessions, name="billing")

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            raise RetryLater(timedelta(hours=1))

        async with running(consumer) as events:
            await events.wait_for(RetryRequested)
            assert starts(database_url) == {message.id: 1}


async def test_what_a_stop_interrupts_counts_no_start(database_url: str) -> None:
    (message,) = numbered(1)
    is_at_work = asyncio.Event()
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(
            Forgetful(message), sessions, name="billing", drain=timedelta(0)
        )

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            is_at_work.set()
            await asyncio.Event().wait()

        async with running(consumer), asyncio.timeout(60):
            await is_at_work.wait()

    assert starts(database_url) == {}


async def test_failures_survive_a_stop(database_url: str) -> None:
    (message,) = numbered(1)
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(Fresh(message), sessions, name="billing", retry=NEVER)

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            raise ValueError("no")

        async with running(consumer) as events:
            await events.wait_for(HandlerFailed)

    assert starts(database_url) == {message.id: 1}


async def test_a_suspect_whose_day_is_gone_is_given_up_as_too_old(
    database_url: str,
) -> None:
    message = Message("orders", b"1", id=id_of(datetime.now(UTC) - timedelta(days=400)))
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(Forgetful(message), sessions, name="billing")

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            raise AssertionError

        async with running(consumer) as events:
            (letter,) = await events.wait_for(MessageDeadLettered)

    assert "MessageTooOldError" in letter.reason
