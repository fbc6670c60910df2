"""Starts of suspects are counted; after an unfinished start the next is isolated."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from typing_extensions import override

from inbox.events import (
    DeliveriesReclaimed,
    DuplicateSkipped,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from inbox.poison.history import (
    FIRST_DELIVERY,
    REDELIVERED,
    Delivered,
    History,
    TakenOver,
)
from inbox.source import Abilities, Delivery
from inbox.sources.memory import MemorySource
from pillarbox import Consumer, Message, RetryLater
from tests.fixtures.consumers import (
    NEVER,
    QUICK,
    async_sessions_of,
    id_of,
    numbered,
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


class RedeliveringSource(MemorySource):
    """A source that counts nothing, and says that each delivery is a repeated one."""

    history: History = REDELIVERED

    def __init__(self, *messages: Message) -> None:
        super().__init__(*messages)
        self._reclaimed = 0
        self.abilities = Abilities(reclaimed=lambda: self._reclaimed)

    @override
    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        given = await super().receive(limit=limit)
        self._reclaimed += len(given)
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


async def test_a_suspect_is_counted_while_it_is_handled(database_url: str) -> None:
    (message,) = numbered(1)
    seen: list[dict[UUID, int]] = []
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(RedeliveringSource(message), sessions, name="billing")

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            seen.append(await asyncio.to_thread(starts, database_url))

        async with running(consumer) as events:
            await events.wait_for(MessageHandled)

    assert seen == [{message.id: 1}]
    assert starts(database_url) == {}


async def test_messages_that_were_delivered_before_are_reported(
    database_url: str,
) -> None:
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(RedeliveringSource(*numbered(3)), sessions, name="billing")

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None: ...

        async with running(consumer) as events:
            await events.wait_for(MessageHandled, 3)

    assert [event.messages for event in events.of(DeliveriesReclaimed)] == [3]


async def test_a_first_delivery_is_not_counted(
    database_url: str,
) -> None:
    seen: list[dict[UUID, int]] = []
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(FirstDeliverySource(*numbered(1)), sessions, name="billing")

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            seen.append(await asyncio.to_thread(starts, database_url))

        async with running(consumer) as events:
            await events.wait_for(MessageHandled)

    assert seen == [{}]


async def test_a_message_whose_last_start_never_finished_runs_alone(
    database_url: str,
) -> None:
    messages = numbered(12, keys=12)
    known = messages[5].id
    note_starts(database_url, known, 1)
    at_work: set[UUID] = set()
    concurrent: dict[UUID, set[UUID]] = {message.id: set() for message in messages}
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(RedeliveringSource(*messages), sessions, name="billing")

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            at_work.add(message.id)
            await session.execute(text("SELECT pg_sleep(0.05)"))
            for id in at_work:
                concurrent[id] |= at_work
            at_work.remove(message.id)

        async with running(consumer) as events:
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
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(
            RedeliveringSource(*messages), sessions, name="billing", retry=QUICK
        )

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            # If the first ran alone, it would wait for the second in vain.
            async with asyncio.timeout(1.5):
                await both.wait()
            raise ValueError("no")

        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered, 2)

    assert {tuple(rest) for _, *rest in letters(database_url)} == {
        (3, "ValueError: no")
    }


class TakenOverSource(RedeliveringSource):
    """A source after a takeover; the previous owner may have started two messages."""

    def __init__(self, *messages: Message) -> None:
        super().__init__(*messages)
        self.history = TakenOver(2)


async def test_after_a_takeover_only_the_first_messages_to_start_are_counted(
    database_url: str,
) -> None:
    messages = numbered(5)
    note_starts(database_url, messages[0].id, 1)
    seen: list[dict[UUID, int]] = []
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(TakenOverSource(*messages), sessions, name="billing")

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            seen.append(await asyncio.to_thread(starts, database_url))

        async with running(consumer) as events:
            await events.wait_for(MessageHandled, len(messages))

    first, second, third, *_ = (message.id for message in messages)
    # The first is already a suspect, so it does not count towards the two.
    assert seen == [{first: 2}, {second: 1}, {third: 1}, {}, {}]


@contextmanager
def statements_on(
    sessions: async_sessionmaker[AsyncSession], table: str
) -> Iterator[list[str]]:
    """Record the first word of each statement on the table by these sessions."""
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if table in statement:
            lines = (line for line in statement.splitlines() if line[:2] != "--")
            seen.append(next(lines).split()[0])

    engine = sessions.kw["bind"].sync_engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", note)


async def test_messages_that_start_together_are_counted_by_one_statement(
    database_url: str,
) -> None:
    messages = numbered(10, keys=10)
    together = asyncio.Barrier(10)
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(
            RedeliveringSource(*messages), sessions, name="billing", max_in_flight=10
        )

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            await together.wait()

        with statements_on(sessions, "inbox.suspect") as seen:
            async with running(consumer) as events:
                await events.wait_for(MessageHandled, 10)

    assert seen.count("INSERT") == 1
    assert starts(database_url) == {}


async def test_after_a_takeover_messages_are_still_handled_in_batches(
    database_url: str,
) -> None:
    messages = numbered(200, keys=200)
    source = TakenOverSource(*messages)
    source.history = TakenOver(256)
    batches: list[int] = []
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(
            source,
            sessions,
            name="billing",
            max_in_flight=100,
            retry=QUICK,
        )

        @consumer.handles_batch("*", max_size=50)
        async def handle(session: AsyncSession, messages: Sequence[Message]) -> None:
            batches.append(len(messages))

        with statements_on(sessions, "inbox.suspect") as seen:
            async with running(consumer) as events:
                await events.wait_for(MessageHandled, len(messages))

    # One by one, they would take 200 statements of each kind and as many batches.
    assert len(batches) <= 20
    assert seen.count("INSERT") <= 20
    assert seen.count("DELETE") <= 20
    assert starts(database_url) == {}


async def test_a_message_that_is_too_old_does_not_keep_others_from_being_counted(
    database_url: str,
) -> None:
    messages = numbered(6, keys=6)
    old = Message("orders", b"1", id=id_of(datetime.now(UTC) - timedelta(days=400)))
    seen: list[dict[UUID, int]] = []
    async with async_sessions_of(database_url) as sessions:
        source = RedeliveringSource(*messages[:3], old, *messages[3:])
        consumer = Consumer(source, sessions, name="billing")

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            seen.append(await asyncio.to_thread(starts, database_url))

        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered)
            await events.wait_for(MessageHandled, len(messages))

    assert len(seen) == len(messages)
    assert all(seen)
    assert starts(database_url) == {}


async def test_messages_waiting_behind_their_key_do_not_hide_a_poison_message(
    database_url: str,
) -> None:
    blocked, poison = numbered(8), Message("orders", b"poison", key="another")
    source = TakenOverSource(*blocked, poison)
    seen: list[dict[UUID, int]] = []
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(source, sessions, name="billing", retry=NEVER)

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            if message.id != poison.id:
                raise ValueError("no")
            seen.append(await asyncio.to_thread(starts, database_url))

        async with running(consumer) as events:
            await events.wait_for(MessageHandled)
            await events.wait_for(HandlerFailed)

    assert [counts[poison.id] for counts in seen] == [1]


async def test_without_a_uuid7_the_brokers_delivery_count_decides(
    database_url: str,
) -> None:
    message = Message("orders", b"1", id=id_of(datetime.now(UTC), version=4))
    source = RedeliveringSource(message)
    source.history = Delivered(before=True, times=3)
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(source, sessions, name="billing", retry=QUICK)

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            raise AssertionError

        async with running(consumer) as events:
            (letter,) = await events.wait_for(MessageDeadLettered)

    assert letter.reason == "was started 3 times and never finished"


async def test_a_message_that_used_up_its_starts_is_dead_lettered_and_not_started(
    database_url: str,
) -> None:
    (message,) = numbered(1)
    note_starts(database_url, message.id, 3)
    called: list[Message] = []
    async with async_sessions_of(database_url) as sessions:
        source = RedeliveringSource(message)
        consumer = Consumer(source, sessions, name="billing", retry=QUICK)

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            called.append(message)

        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered)

    reason = "was started 3 times and never finished"
    assert letters(database_url) == [(str(message.id), 3, reason)]
    assert (called, source.acked, starts(database_url)) == ([], [message], {})


async def test_a_message_that_used_up_its_starts_but_has_a_receipt_is_acked(
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
        consumer = Consumer(
            RedeliveringSource(message), sessions, name="billing", retry=QUICK
        )

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            raise AssertionError

        async with running(consumer) as events:
            await events.wait_for(DuplicateSkipped)

    assert (letters(database_url), starts(database_url)) == ([], {})


async def test_failures_are_added_to_the_counted_starts(
    database_url: str,
) -> None:
    (message,) = numbered(1)
    note_starts(database_url, message.id, 1)
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(
            RedeliveringSource(message), sessions, name="billing", retry=QUICK
        )

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            raise ValueError("no")

        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered)

    assert [event.attempts for event in events.of(HandlerFailed)] == [2]
    assert letters(database_url) == [(str(message.id), 3, "ValueError: no")]
    assert starts(database_url) == {}


async def test_retry_later_counts_no_start(database_url: str) -> None:
    (message,) = numbered(1)
    note_starts(database_url, message.id, 1)
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(RedeliveringSource(message), sessions, name="billing")

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            raise RetryLater(timedelta(hours=1))

        async with running(consumer) as events:
            await events.wait_for(RetryRequested)
            assert starts(database_url) == {message.id: 1}


async def test_a_start_interrupted_by_a_stop_is_not_counted(database_url: str) -> None:
    (message,) = numbered(1)
    is_at_work = asyncio.Event()
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(
            RedeliveringSource(message), sessions, name="billing", drain=timedelta(0)
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
        consumer = Consumer(
            FirstDeliverySource(message), sessions, name="billing", retry=NEVER
        )

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            raise ValueError("no")

        async with running(consumer) as events:
            await events.wait_for(HandlerFailed)

    assert starts(database_url) == {message.id: 1}


async def test_a_suspect_without_a_partition_for_its_day_is_too_old(
    database_url: str,
) -> None:
    message = Message("orders", b"1", id=id_of(datetime.now(UTC) - timedelta(days=400)))
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(RedeliveringSource(message), sessions, name="billing")

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            raise AssertionError

        async with running(consumer) as events:
            (letter,) = await events.wait_for(MessageDeadLettered)

    assert "MessageTooOldError" in letter.reason
