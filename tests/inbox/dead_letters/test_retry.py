"""Retries handle dead letters of the inbox again, and each takes effect once."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from psycopg import sql
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session

from inbox.sources.memory import MemorySource
from outbox.dead_letters import Candidate, Criteria, RetrySchedule, Scheduler
from outbox.dead_letters.retry import RetryCounts
from outbox.errors import ConfigError
from outbox.testing.events import RecordedEvents
from pillarbox import Consumer, DeadLetter, Message, RetryLater
from tests.fixtures.consumers import id_of, sessions_of
from tests.fixtures.dead_letters import give_up, retry, states
from tests.fixtures.effects import effects, note, receipts
from tests.fixtures.endings import WAYS
from tests.fixtures.sessions import execute

PENDING = Criteria()


async def test_success_commits_effects_receipt_and_state_together(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = Consumer(MemorySource(), sessions, name="billing")
    seen: list[Message] = []

    @consumer.handles("orders.*")
    async def handle(session: AsyncSession, message: Message) -> None:
        seen.append(message)
        await note(session, message)

    message = Message("orders.placed", {"a": 1}, key="k", headers={"h": "v"})
    give_up(database_url, message, schema="inbox")

    assert await retry(consumer.retrier()) == RetryCounts(succeeded=1)

    assert seen == [message]
    assert effects(database_url) == ['{"a":1}']
    assert receipts(database_url) == 1
    assert states(database_url, "inbox") == [("SUCCEEDED", 0, "refused")]


async def test_the_retry_of_a_handled_message_succeeds_without_its_handler(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = Consumer(MemorySource(), sessions, name="billing")

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        await note(session, message)

    message = Message("orders", b"once")
    give_up(database_url, message, schema="inbox")
    execute(
        database_url,
        "INSERT INTO inbox.receipt VALUES (%s, inbox.moment_of(%s), now(), 'billing')",
        (message.id, message.id),
    )

    assert await retry(consumer.retrier()) == RetryCounts(succeeded=1)
    assert effects(database_url) == []
    assert states(database_url, "inbox") == [("SUCCEEDED", 0, "refused")]


async def test_a_failed_retry_updates_reason_and_schedule_and_leaves_no_effects(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = Consumer(MemorySource(), sessions, name="billing")

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        await note(session, message)
        raise DeadLetter("still no such customer")

    give_up(database_url, Message("orders", b"never"), schema="inbox")

    assert await retry(consumer.retrier()) == RetryCounts(failed=1)
    assert effects(database_url) == []
    assert receipts(database_url) == 0
    reason = "DeadLetter: still no such customer"
    assert states(database_url, "inbox") == [("PENDING", 1, reason)]
    ((trace, later),) = execute(
        database_url,
        "SELECT error_stacktrace, retry_after > now() FROM inbox.dead_letter",
    )
    assert "still no such customer" in trace
    assert later


async def test_a_retry_that_commits_past_its_session_must_be_retried_by_hand(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = Consumer(MemorySource(), sessions, name="billing")
    do = WAYS["COMMIT by a cursor"].do

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        await note(session, message)
        await session.run_sync(do)

    give_up(database_url, Message("orders", b"committed"), schema="inbox")

    assert await retry(consumer.retrier()) == RetryCounts(failed=1)
    ((state, count, reason),) = states(database_url, "inbox")
    assert (state, count) == ("PENDING", 1)
    assert "may be committed, with the receipt" in reason
    query = "SELECT retry_after FROM inbox.dead_letter"
    assert execute(database_url, query) == [(None,)]


async def test_retry_later_costs_no_attempt(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = Consumer(MemorySource(), sessions, name="billing")

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        raise RetryLater(timedelta(days=1), "closed on Fridays")

    give_up(database_url, Message("orders", b""), schema="inbox")

    assert await retry(consumer.retrier()) == RetryCounts(failed=1)
    assert states(database_url, "inbox") == [("PENDING", 0, "closed on Fridays")]
    query = "SELECT retry_after > now() + interval '23 hours' FROM inbox.dead_letter"
    assert execute(database_url, query) == [(True,)]


async def test_a_delay_of_a_day_is_24_hours_although_clocks_are_put_forward_meanwhile(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    change = datetime.now(UTC) + timedelta(hours=12)
    day = change.timetuple().tm_yday - 1
    zone = f"STD0DST,{day}/{change.hour},{(day + 60) % 365}/0"
    name = sql.Identifier(database_url.rpartition("/")[2]).as_string()
    execute(database_url, f"ALTER DATABASE {name} SET timezone = '{zone}'")
    query = "SELECT now() + interval '1 day' = now() + interval '23 hours'"
    assert execute(database_url, query) == [(True,)]
    consumer = Consumer(MemorySource(), sessions, name="billing")

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        raise RetryLater(timedelta(days=1), "tomorrow")

    give_up(database_url, Message("orders", b""), schema="inbox")

    assert await retry(consumer.retrier()) == RetryCounts(failed=1)
    query = "SELECT retry_after > now() + interval '23.9 hours' FROM inbox.dead_letter"
    assert execute(database_url, query) == [(True,)]


async def test_a_dead_letter_without_a_handler_stays_pending_with_that_reason(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = Consumer(MemorySource(), sessions, name="billing")

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        await note(session, message)

    give_up(database_url, Message("invoices", b""), schema="inbox")

    assert await retry(consumer.retrier()) == RetryCounts(failed=1)
    ((status, count, reason),) = states(database_url, "inbox")
    assert (status, count) == ("PENDING", 1)
    assert "'billing' has no handler for topic 'invoices'" in reason


async def test_a_message_too_old_to_deduplicate_is_dead_lettered(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = Consumer(MemorySource(), sessions, name="billing")

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        await note(session, message)

    old = id_of(datetime.now(UTC) - timedelta(days=90))
    give_up(database_url, Message("orders", b"", id=old), schema="inbox")
    give_up(
        database_url, Message("orders", b""), schema="inbox", message_id="sha256:00"
    )

    assert await retry(consumer.retrier()) == RetryCounts(failed=2)
    assert effects(database_url) == []
    reasons = [reason for _, _, reason in states(database_url, "inbox")]
    assert any("MessageTooOldError" in reason for reason in reasons)
    assert any("isn't a UUIDv7" in reason for reason in reasons)


async def test_dead_letters_of_other_consumers_are_left_alone(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    (id,) = give_up(
        database_url, Message("orders", b""), schema="inbox", origin="consumer:shipping"
    )
    consumer = Consumer(MemorySource(), sessions, name="billing")

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        await note(session, message)

    assert await retry(consumer.retrier()) == RetryCounts()
    ((created_at,),) = execute(database_url, "SELECT created_at FROM inbox.dead_letter")
    async with consumer.retrier() as retrier:
        with pytest.raises(ConfigError, match="dead-lettered by consumer:shipping"):
            await retrier.retry(Candidate(id, created_at))


async def test_plain_functions_are_retried_in_threads(database_url: str) -> None:
    execute(database_url, "CREATE TABLE effect (what text)")
    with sessions_of(database_url) as sessions:
        consumer = Consumer(MemorySource(), sessions, name="billing")

        @consumer.handles("orders")
        def handle(session: Session, message: Message) -> None:
            session.execute(text("INSERT INTO effect VALUES ('done')"))
            if message.payload == b"bad":
                raise ValueError("bad")

        give_up(
            database_url,
            Message("orders", b"bad"),
            Message("orders", b"good"),
            schema="inbox",
        )
        events = RecordedEvents()
        scheduler = Scheduler(
            lambda: consumer.retrier(RetrySchedule(), events),
            RetrySchedule(),
            schema="inbox",
            origin="consumer:billing",
            notify=events,
        )
        assert await scheduler.run_due() == RetryCounts(succeeded=1, failed=1)
        assert await scheduler.run_due() == RetryCounts()
    assert effects(database_url) == ["done"]


async def test_a_batch_handler_receives_one_dead_letter_at_a_time(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = Consumer(MemorySource(), sessions, name="billing")

    @consumer.handles_batch("orders", max_size=10)
    async def handle(session: AsyncSession, messages: Sequence[Message]) -> None:
        for message in messages:
            await note(session, message)
        if messages[0].payload == b"bad":
            raise ValueError("bad")

    give_up(
        database_url,
        Message("orders", b"bad"),
        Message("orders", b"good"),
        schema="inbox",
    )

    assert await retry(consumer.retrier()) == RetryCounts(succeeded=1, failed=1)
    assert effects(database_url) == ["good"]
    assert receipts(database_url) == 1


async def test_a_batch_handler_can_be_a_plain_function(database_url: str) -> None:
    execute(database_url, "CREATE TABLE effect (what text)")
    with sessions_of(database_url) as sessions:
        consumer = Consumer(MemorySource(), sessions, name="billing")

        @consumer.handles_batch("orders", max_size=10)
        def handle(session: Session, messages: Sequence[Message]) -> None:
            session.execute(text("INSERT INTO effect VALUES ('done')"))

        give_up(database_url, Message("orders", b""), schema="inbox")
        assert await retry(consumer.retrier()) == RetryCounts(succeeded=1)
    assert effects(database_url) == ["done"]
    assert receipts(database_url) == 1
