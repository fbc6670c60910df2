"""One dead letter per message, despite crashes and concurrent writers."""

from datetime import timedelta

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import sessionmaker

from inbox.dead_letters.write import DeadLetterWriter
from inbox.events import (
    DeadLetterRepeated,
    DuplicateSkipped,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
)
from inbox.handlers.sessions import make_executor
from inbox.sources.memory import MemorySource
from outbox.dead_letters import RetryCounts
from outbox.gather import gather
from outbox.postgres.connection import sqlalchemy_url
from outbox.retry import RetryPolicy
from pillarbox import Consumer, DeadLetter, Message
from relay.publishers.postgres import PostgresPublisher
from tests.fixtures.consumers import QUICK, async_sessions_of, running, sessions_of
from tests.fixtures.dead_letters import retry, states
from tests.fixtures.sessions import execute

pytestmark = pytest.mark.timeout(180)


def count(url: str) -> int:
    ((rows,),) = execute(url, "SELECT count(*) FROM inbox.dead_letter")
    return int(rows)


async def test_a_redelivered_message_is_not_dead_lettered_again(
    database_url: str,
) -> None:
    source = MemorySource()
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(source, sessions, name="billing")

        @consumer.handles("orders")
        async def handle(session: AsyncSession, message: Message) -> None:
            raise DeadLetter("no such customer")

        message = Message("orders", b"")
        async with running(consumer) as events:
            source.add(message)
            await events.wait_for(MessageDeadLettered, timeout=60)
            # As if the consumer had crashed between the dead letter and the ack.
            source.add(message)
            source.add(Message("orders", b"another"))
            await events.wait_for(MessageDeadLettered, 2, timeout=60)
    assert len(source.acked) == 3
    assert len(events.of(MessageDeadLettered)) == 2
    assert len(events.of(DeadLetterRepeated)) == 1
    assert count(database_url) == 2


async def test_a_crash_between_dead_letter_and_ack_leaves_one_dead_letter(
    database_url: str,
) -> None:
    execute(database_url, "INSERT INTO inbox.subscription VALUES ('billing', 'orders')")
    message = Message("orders", b"")
    async with PostgresPublisher(database_url) as publisher:
        await publisher.publish([message])
    async with async_sessions_of(database_url) as sessions:
        # What the crashed consumer had committed; its database is also the broker.
        writer = DeadLetterWriter("billing", make_executor(sessions, "billing", 1))
        assert (await writer.write(message, attempts=1, failure="no")).is_new

        consumer = Consumer(database_url, sessions, name="billing")

        @consumer.handles("orders")
        async def handle(session: AsyncSession, message: Message) -> None:
            raise DeadLetter("no such customer")

        async with running(consumer) as events:
            await events.wait_for(DeadLetterRepeated, timeout=60)
    assert states(database_url, "inbox") == [("PENDING", 0, "no")]
    query = "SELECT acked_at IS NOT NULL FROM inbox.delivery_status"
    assert execute(database_url, query) == [(True,)]


async def test_after_a_successful_redelivery_a_retry_settles_the_dead_letter(
    database_url: str,
) -> None:
    source = MemorySource()
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(source, sessions, name="billing", retry=QUICK)
        calls: list[Message] = []

        @consumer.handles("orders")
        async def handle(session: AsyncSession, message: Message) -> None:
            calls.append(message)
            if len(calls) == 1:
                raise DeadLetter("not yet")

        message = Message("orders", b"")
        async with running(consumer) as events:
            source.add(message)
            await events.wait_for(MessageDeadLettered, timeout=60)
            source.add(message)
            await events.wait_for(MessageHandled, timeout=60)
        assert states(database_url, "inbox")[0][0] == "PENDING"
        tally = await retry(consumer.retrier())
    assert tally == RetryCounts(succeeded=1)
    assert len(calls) == 2


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
async def test_concurrent_consumers_write_one_dead_letter(
    database_url: str, level: str
) -> None:
    engine = create_engine(
        sqlalchemy_url(database_url), isolation_level=level, pool_size=8
    )
    writer = DeadLetterWriter(
        "billing", make_executor(sessionmaker(engine), "billing", 8)
    )
    message = Message("orders", b"")

    async def write(_: int) -> bool:
        written = await writer.write(message, attempts=1, failure="no")
        return written.is_new

    new = await gather(write(n) for n in range(24))
    engine.dispose()
    assert sum(new) == 1
    assert count(database_url) == 1


async def test_a_message_can_be_dead_lettered_again_once_its_dead_letter_is_settled(
    database_url: str,
) -> None:
    with sessions_of(database_url) as sessions:
        writer = DeadLetterWriter("billing", make_executor(sessions, "billing", 1))
        message = Message("orders", b"")
        assert (await writer.write(message, attempts=1, failure="one")).is_new
        assert not (await writer.write(message, attempts=1, failure="two")).is_new
        execute(database_url, "UPDATE inbox.dead_letter SET status = 'SUCCEEDED'")
        assert (await writer.write(message, attempts=1, failure="three")).is_new
        other = DeadLetterWriter("shipping", make_executor(sessions, "shipping", 1))
        assert (await other.write(message, attempts=1, failure="four")).is_new
    assert count(database_url) == 3


async def test_an_unreadable_message_is_identified_by_all_its_content(
    database_url: str,
) -> None:
    with sessions_of(database_url) as sessions:
        writer = DeadLetterWriter("billing", make_executor(sessions, "billing", 1))

        async def is_new(message: Message) -> bool:
            # Each time with another id, because the source has to invent one.
            written = await writer.write(
                message, attempts=1, failure="no id", readable=False
            )
            return written.is_new

        assert await is_new(Message("orders", b"garbage"))
        assert not await is_new(Message("orders", b"garbage"))
        assert await is_new(Message("orders", b"other garbage"))
        assert await is_new(Message("orders", b"garbage", headers={"n": "1"}))
    rows = execute(database_url, "SELECT message_id FROM inbox.dead_letter")
    assert all(id.startswith("sha256:") for (id,) in rows)


async def test_redact_hides_secrets_wherever_an_error_appears(
    database_url: str,
) -> None:
    source = MemorySource()
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(
            source,
            sessions,
            name="billing",
            retry=RetryPolicy(
                max_attempts=2,
                first_delay=timedelta(milliseconds=1),
                max_delay=timedelta(milliseconds=2),
            ),
            redact=lambda said: said.replace("hunter2", "…"),
        )

        @consumer.handles("orders")
        async def handle(session: AsyncSession, message: Message) -> None:
            raise ValueError("wrong password hunter2")

        async with running(consumer) as events:
            source.add(Message("orders", b""))
            await events.wait_for(MessageDeadLettered, timeout=60)
    ((reason, trace),) = execute(
        database_url, "SELECT error_reason, error_stacktrace FROM inbox.dead_letter"
    )
    (failed,) = events.of(HandlerFailed)
    assert reason == failed.reason == "ValueError: wrong password …"
    assert "wrong password …" in trace
    assert "hunter2" not in trace.replace('said.replace("hunter2"', "")


async def test_a_failing_redact_function_hides_the_whole_error(
    database_url: str,
) -> None:
    def redact(said: str) -> str:
        raise KeyError(said)

    with sessions_of(database_url) as sessions:
        writer = DeadLetterWriter(
            "billing", make_executor(sessions, "billing", 1), redact
        )
        await writer.write(
            Message("orders", b""), attempts=1, failure=ValueError("hunter2")
        )
    query = "SELECT error_reason, error_stacktrace FROM inbox.dead_letter"
    left_out = "left out: redact raised KeyError"
    assert execute(database_url, query) == [(left_out, left_out)]


async def test_a_message_started_too_often_without_finishing_is_not_restarted(
    database_url: str,
) -> None:
    source = MemorySource()
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(source, sessions, name="billing", retry=QUICK)
        handled: list[bytes] = []

        @consumer.handles("orders")
        async def handle(session: AsyncSession, message: Message) -> None:
            handled.append(message.payload)

        known = Message("orders", b"known")
        async with running(consumer) as events:
            source.add(known)
            await events.wait_for(MessageHandled, timeout=60)
            # As if it had died between its commit and its ack.
            source.return_later(known, 3, timedelta(0))
            await events.wait_for(DuplicateSkipped, timeout=60)
            # As a broker counts deliveries to dead consumers; the policy allows three.
            for attempts in (3, 2):
                payload = str(attempts).encode()
                source.return_later(Message("orders", payload), attempts, timedelta(0))
            await events.wait_for(MessageDeadLettered, timeout=60)
            await events.wait_for(MessageHandled, 2, timeout=60)
    assert handled == [b"known", b"2"]
    (given_up,) = events.of(MessageDeadLettered)
    assert given_up.attempts == 3
    assert given_up.reason == "was started 3 times and never finished"
    assert len(source.acked) == 4
