"""Starts of suspects are counted; after an unfinished start the next is isolated."""

import asyncio
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession
from typing_extensions import override

from pillarbox import Consumer, Message, RetryLater
from pillarbox.inbox.events import (
    DuplicateSkipped,
    HandlerDatabaseLost,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from pillarbox.inbox.poison.history import (
    FIRST_DELIVERY,
    REDELIVERED,
    History,
    TakenOver,
)
from pillarbox.inbox.source import Delivery
from pillarbox.inbox.sources.memory import MemorySource
from tests.fixtures.consumers import (
    NEVER,
    QUICK,
    async_sessions_of,
    consuming,
    id_of,
    numbered,
    recorded_statements,
    running,
)
from tests.fixtures.sessions import execute

STARTS = "SELECT message_id, starts FROM inbox.suspect ORDER BY message_id"
SUSPECT = """
INSERT INTO inbox.suspect (message_id, message_at, consumer, starts, is_open)
VALUES (%s, inbox.moment_of(%s), 'billing', %s, %s)
"""


class Redelivery:
    """A delivery from a broker that doesn't count starts."""

    def __init__(self, delivery: Delivery, history: History) -> None:
        self.message = delivery.message
        self.attempts = 0
        self.problem = delivery.problem
        self.history = history
        self.published_at = None
        self.ack = delivery.ack
        self.nack = delivery.nack
        self.hand_back = delivery.hand_back


class RedeliveringSource(MemorySource):
    """A source that counts nothing, and says that each delivery is a repeated one."""

    history: History = REDELIVERED

    @override
    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        given = await super().receive(limit=limit)
        return [Redelivery(delivery, self.history) for delivery in given]


class FirstDeliverySource(RedeliveringSource):
    """A source that counts nothing, and says that each delivery is the first."""

    history = FIRST_DELIVERY


def note_starts(url: str, id: UUID, starts: int, *, is_open: bool = True) -> None:
    execute(url, SUSPECT, [id, id, starts, is_open])


def starts(url: str) -> dict[UUID, int]:
    return dict(execute(url, STARTS))


def letters(url: str) -> list[tuple[Any, ...]]:
    return execute(
        url, "SELECT message_id, attempts, error_reason FROM inbox.dead_letter"
    )


async def fail(session: AsyncSession, message: Message) -> None:
    raise ValueError("no")


async def accept(session: AsyncSession, message: Message) -> None: ...


async def never(session: AsyncSession, message: Message) -> None:
    raise AssertionError("the handler was called")


class Noting:
    """A handler that notes which starts are counted while it runs."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.seen: list[dict[UUID, int]] = []

    async def __call__(self, session: AsyncSession, message: Message) -> None:
        self.seen.append(await asyncio.to_thread(starts, self._url))


async def test_a_suspect_is_reported_and_counted_while_it_is_handled(
    database_url: str,
) -> None:
    messages, noting = numbered(3), Noting(database_url)
    async with consuming(database_url, RedeliveringSource(*messages), noting) as events:
        await events.wait_for(MessageHandled, 3)

    assert noting.seen == [{message.id: 1} for message in messages]
    assert starts(database_url) == {}


async def test_a_first_delivery_is_not_counted(database_url: str) -> None:
    noting = Noting(database_url)
    source = FirstDeliverySource(*numbered(1))
    async with consuming(database_url, source, noting) as events:
        await events.wait_for(MessageHandled)
    assert noting.seen == [{}]


async def test_a_message_whose_last_start_never_finished_runs_alone(
    database_url: str,
) -> None:
    messages = numbered(12, keys=12)
    known = messages[5].id
    note_starts(database_url, known, 1)
    at_work: set[UUID] = set()
    concurrent: dict[UUID, set[UUID]] = {message.id: set() for message in messages}

    async def handle(session: AsyncSession, message: Message) -> None:
        at_work.add(message.id)
        await session.execute(text("SELECT pg_sleep(0.05)"))
        for id in at_work:
            concurrent[id] |= at_work
        at_work.remove(message.id)

    async with consuming(database_url, RedeliveringSource(*messages), handle) as events:
        await events.wait_for(MessageHandled, len(messages))

    assert concurrent[known] == {known}
    assert max(len(others) for others in concurrent.values()) > 1
    assert starts(database_url) == {}


async def test_a_message_that_failed_before_a_stop_runs_with_others(
    database_url: str,
) -> None:
    messages = numbered(2, keys=2)
    for message in messages:
        note_starts(database_url, message.id, 2, is_open=False)
    both = asyncio.Barrier(2)

    async def handle(session: AsyncSession, message: Message) -> None:
        # If the first ran alone, it would wait for the second in vain.
        async with asyncio.timeout(1.5):
            await both.wait()
        raise ValueError("no")

    source = RedeliveringSource(*messages)
    async with consuming(
        database_url, source, handle, retry=QUICK, redact=str
    ) as events:
        await events.wait_for(MessageDeadLettered, 2)

    assert {tuple(rest) for _, *rest in letters(database_url)} == {
        (3, "ValueError: no")
    }


def taken_over(started: int, *messages: Message) -> RedeliveringSource:
    """Return a source whose previous owner may have started this many messages."""
    source = RedeliveringSource(*messages)
    source.history = TakenOver(started)
    return source


async def test_after_a_takeover_only_the_first_messages_to_start_are_counted(
    database_url: str,
) -> None:
    messages, noting = numbered(5), Noting(database_url)
    note_starts(database_url, messages[0].id, 1)
    source = taken_over(2, *messages)
    async with consuming(database_url, source, noting) as events:
        await events.wait_for(MessageHandled, len(messages))

    first, second, third, *_ = (message.id for message in messages)
    # The first is already a suspect, so it does not count towards the two.
    assert noting.seen == [{first: 2}, {second: 1}, {third: 1}, {}, {}]


def on_suspects(statements: list[str], verb: str) -> int:
    """Count the statements with this verb on the table of suspects."""
    without_comments = (re.sub("--.*", "", statement) for statement in statements)
    return sum(
        statement.split()[0] == verb and "inbox.suspect" in statement
        for statement in without_comments
    )


async def test_after_a_takeover_messages_are_still_handled_in_batches(
    database_url: str,
) -> None:
    source = taken_over(256, *numbered(200, keys=200))
    batches: list[int] = []
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(source, sessions, name="billing", max_in_flight=100)

        @consumer.handles_batch("*", max_size=50)
        async def handle(session: AsyncSession, messages: Sequence[Message]) -> None:
            batches.append(len(messages))

        with recorded_statements(sessions) as seen:
            async with running(consumer) as events:
                await events.wait_for(MessageHandled, 200)

    # One by one, they would take 200 statements of each kind and as many batches.
    assert len(batches) <= 20
    assert on_suspects(seen, "INSERT") <= 20
    assert on_suspects(seen, "DELETE") <= 20
    assert starts(database_url) == {}


async def test_a_message_that_is_too_old_does_not_keep_others_from_being_counted(
    database_url: str,
) -> None:
    messages, noting = numbered(6, keys=6), Noting(database_url)
    old = Message("orders", b"1", id=id_of(datetime.now(UTC) - timedelta(days=400)))
    source = RedeliveringSource(*messages[:3], old, *messages[3:])
    async with consuming(database_url, source, noting) as events:
        (letter,) = await events.wait_for(MessageDeadLettered)
        await events.wait_for(MessageHandled, len(messages))

    assert "MessageTooOldError" in letter.reason
    assert len(noting.seen) == len(messages)
    assert all(noting.seen)
    assert starts(database_url) == {}


async def test_messages_waiting_behind_their_key_do_not_hide_a_poison_message(
    database_url: str,
) -> None:
    blocked, poison = numbered(8), Message("orders", b"poison", key="another")
    noting = Noting(database_url)

    async def handle(session: AsyncSession, message: Message) -> None:
        if message.id != poison.id:
            raise ValueError("no")
        await noting(session, message)

    source = taken_over(2, *blocked, poison)
    async with consuming(database_url, source, handle, retry=NEVER) as events:
        await events.wait_for(MessageHandled)
        await events.wait_for(HandlerFailed)

    assert [counts[poison.id] for counts in noting.seen] == [1]


async def test_a_message_that_used_up_its_starts_is_dead_lettered_and_not_started(
    database_url: str,
) -> None:
    (message,) = numbered(1)
    note_starts(database_url, message.id, 3)
    source = RedeliveringSource(message)
    async with consuming(database_url, source, never, retry=QUICK) as events:
        await events.wait_for(MessageDeadLettered)

    reason = "started 3 times and never finished"
    assert letters(database_url) == [(str(message.id), 3, reason)]
    assert (source.acked, starts(database_url)) == ([message], {})


async def test_failures_are_added_to_the_counted_starts(database_url: str) -> None:
    (message,) = numbered(1)
    note_starts(database_url, message.id, 1)
    source = RedeliveringSource(message)
    async with consuming(database_url, source, fail, retry=QUICK, redact=str) as events:
        await events.wait_for(MessageDeadLettered)

    assert letters(database_url) == [(str(message.id), 3, "ValueError: no")]
    assert starts(database_url) == {}


async def test_retry_later_counts_no_start(database_url: str) -> None:
    (message,) = numbered(1)
    note_starts(database_url, message.id, 1)

    async def postpone(session: AsyncSession, message: Message) -> None:
        raise RetryLater(timedelta(hours=1))

    async with consuming(database_url, RedeliveringSource(message), postpone) as events:
        await events.wait_for(RetryRequested)
        assert starts(database_url) == {message.id: 1}


async def test_a_start_interrupted_by_a_stop_is_not_counted(database_url: str) -> None:
    is_at_work = asyncio.Event()

    async def hang(session: AsyncSession, message: Message) -> None:
        is_at_work.set()
        await asyncio.Event().wait()

    source = RedeliveringSource(*numbered(1))
    async with consuming(database_url, source, hang, drain=timedelta(0)):
        await is_at_work.wait()
    assert starts(database_url) == {}


async def test_failures_survive_a_stop(database_url: str) -> None:
    (message,) = numbered(1)
    source = FirstDeliverySource(message)
    async with consuming(database_url, source, fail, retry=NEVER) as events:
        await events.wait_for(HandlerFailed)
    assert starts(database_url) == {message.id: 1}


async def test_a_message_whose_id_no_receipt_can_have_is_dead_lettered_at_once(
    database_url: str,
) -> None:
    source = MemorySource()
    for id in (uuid4(), UUID(int=2**128 - 1)):
        source.add(Message("orders", b"", id=id), attempts=3)
    async with consuming(database_url, source, accept, retry=QUICK) as events:
        await events.wait_for(MessageDeadLettered, 2)
    assert events.of(HandlerDatabaseLost) == []


async def test_a_lookup_that_fails_is_repeated_and_finds_the_receipt(
    database_url: str,
) -> None:
    message = Message("orders", b"")
    source = MemorySource(message)
    failures = [OperationalError("SELECT", {}, Exception("a blink"))]

    def fail_once(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("SELECT inbox.receipt") and failures:
            raise failures.pop()

    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(source, sessions, name="billing", retry=QUICK)
        consumer.handles("orders")(accept)
        event.listen(
            sessions.kw["bind"].sync_engine, "before_cursor_execute", fail_once
        )
        async with running(consumer) as events:
            await events.wait_for(MessageHandled)
            # As if it had died between its commit and its ack.
            source.add(message, attempts=3)
            await events.wait_for(DuplicateSkipped)
    assert failures == []
