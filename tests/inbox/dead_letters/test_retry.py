"""Retries handle dead letters of the inbox again, and each takes effect once."""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session

from pillarbox import Consumer, DeadLetter, Message, RetryLater
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.dead_letters.retry import Candidate
from pillarbox.outbox.dead_letters.schedule import RetrySchedule, Scheduler
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.testing.events import RecordedEvents
from tests.fixtures.consumers import handles, id_of, sessions_of
from tests.fixtures.dead_letters import give_up, retry, states
from tests.fixtures.effects import EFFECT, effects, note, receipts
from tests.fixtures.endings import WAYS
from tests.fixtures.sessions import execute

RETRY_AFTER = "SELECT retry_after FROM inbox.dead_letter"


def consumer_of(
    sessions: Any, handler: Callable[..., Any], *, batch: int | None = None
) -> Consumer:
    consumer = Consumer(MemorySource(), sessions, name="billing")
    handles(consumer, "orders.*", batch=batch)(handler)
    return consumer


def order(payload: object = b"", **fields: Any) -> Message:
    return Message("orders.placed", payload, **fields)


async def test_success_commits_effects_receipt_and_state_together(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    seen: list[Message] = []

    async def handle(session: AsyncSession, message: Message) -> None:
        seen.append(message)
        await note(session, message)

    message = order({"a": 1}, key="k", headers={"h": "v"})
    give_up(url, message, schema="inbox")

    consumer = consumer_of(sessions, handle)
    assert await retry(consumer.retrier()) == Counter(succeeded=1)
    assert seen == [message]
    assert effects(url) == ['{"a":1}']
    assert receipts(url) == 1
    assert states(url, "inbox") == [("SUCCEEDED", 0, "refused")]


async def test_the_retry_of_a_handled_message_succeeds_without_its_handler(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    message = order(b"once")
    give_up(url, message, schema="inbox")
    execute(
        url,
        "INSERT INTO inbox.receipt VALUES (%s, inbox.moment_of(%s), now(), 'billing')",
        (message.id, message.id),
    )

    consumer = consumer_of(sessions, note)
    assert await retry(consumer.retrier()) == Counter(succeeded=1)
    assert effects(url) == []
    assert states(url, "inbox") == [("SUCCEEDED", 0, "refused")]


async def test_a_failed_retry_updates_reason_and_schedule_and_leaves_no_effects(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    async def handle(session: AsyncSession, message: Message) -> None:
        await note(session, message)
        raise DeadLetter("still no such customer")

    give_up(url, order(b"never"), schema="inbox")

    consumer = consumer_of(sessions, handle)
    assert await retry(consumer.retrier()) == Counter(failed=1)
    assert effects(url) == []
    assert receipts(url) == 0
    reason = "DeadLetter: still no such customer"
    assert states(url, "inbox") == [("PENDING", 1, reason)]
    ((trace, later),) = execute(
        url, "SELECT error_stacktrace, retry_after > now() FROM inbox.dead_letter"
    )
    assert "still no such customer" in trace
    assert later


async def test_a_retry_that_commits_past_its_session_must_be_retried_by_hand(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    async def handle(session: AsyncSession, message: Message) -> None:
        await note(session, message)
        await session.run_sync(WAYS["COMMIT by a cursor"].do)

    give_up(url, order(b"committed"), schema="inbox")

    consumer = consumer_of(sessions, handle)
    assert await retry(consumer.retrier()) == Counter(failed=1)
    ((state, count, reason),) = states(url, "inbox")
    assert (state, count) == ("PENDING", 1)
    assert "may be committed, with the receipt" in reason
    assert execute(url, RETRY_AFTER) == [(None,)]


async def test_retry_later_costs_no_attempt(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    async def handle(session: AsyncSession, message: Message) -> None:
        raise RetryLater(timedelta(days=1), "closed on Fridays")

    give_up(url, order(), schema="inbox")

    consumer = consumer_of(sessions, handle)
    assert await retry(consumer.retrier()) == Counter(failed=1)
    assert states(url, "inbox") == [("PENDING", 0, "closed on Fridays")]
    query = "SELECT retry_after > now() + interval '23.9 hours' FROM inbox.dead_letter"
    assert execute(url, query) == [(True,)]


async def test_a_dead_letter_without_a_handler_stays_pending_with_that_reason(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    give_up(url, Message("invoices", b""), schema="inbox")

    consumer = consumer_of(sessions, note)
    assert await retry(consumer.retrier()) == Counter(failed=1)
    ((status, count, reason),) = states(url, "inbox")
    assert (status, count) == ("PENDING", 1)
    assert "'billing' has no handler for topic 'invoices'" in reason


async def test_a_message_too_old_to_deduplicate_is_dead_lettered(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    old = id_of(datetime.now(UTC) - timedelta(days=90))
    give_up(url, order(id=old), schema="inbox")
    give_up(url, order(), schema="inbox", message_id="sha256:00")

    consumer = consumer_of(sessions, note)
    assert await retry(consumer.retrier()) == Counter(failed=2)
    assert effects(url) == []
    reasons = [reason for _, _, reason in states(url, "inbox")]
    assert any("MessageTooOldError" in reason for reason in reasons)
    assert any("isn't a UUIDv7" in reason for reason in reasons)


async def test_dead_letters_of_other_consumers_are_left_alone(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    (id,) = give_up(url, order(), schema="inbox", origin="consumer:shipping")
    consumer = consumer_of(sessions, note)

    assert await retry(consumer.retrier()) == Counter()
    ((created_at,),) = execute(url, "SELECT created_at FROM inbox.dead_letter")
    async with consumer.retrier() as retrier:
        with pytest.raises(ConfigError, match="belongs to consumer:shipping"):
            await retrier.retry(Candidate(id, created_at))


async def test_plain_functions_are_retried_in_threads(url: str) -> None:
    def handle(session: Session, message: Message) -> None:
        session.execute(EFFECT, {"what": message.payload.decode()})
        if message.payload == b"bad":
            raise ValueError("bad")

    def handle_many(session: Session, messages: Sequence[Message]) -> None:
        (message,) = messages
        handle(session, message)

    with sessions_of(url) as sessions:
        consumer = consumer_of(sessions, handle)
        consumer.handles_batch("bulk", max_size=10)(handle_many)
        messages = order(b"bad"), order(b"good"), Message("bulk", b"many")
        give_up(url, *messages, schema="inbox")
        events = RecordedEvents()
        scheduler = Scheduler(
            lambda: consumer.retrier(RetrySchedule(), events),
            RetrySchedule(),
            schema="inbox",
            origin="consumer:billing",
            notify=events,
        )
        assert await scheduler.run_due() == Counter(succeeded=2, failed=1)
        assert await scheduler.run_due() == Counter()
    assert effects(url) == ["good", "many"]
    assert receipts(url) == 2
    settled = sorted(status for status, _, _ in states(url, "inbox"))
    assert settled == ["PENDING", "SUCCEEDED", "SUCCEEDED"]


async def test_a_batch_handler_receives_one_dead_letter_at_a_time(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    async def handle(session: AsyncSession, messages: Sequence[Message]) -> None:
        (message,) = messages
        await note(session, message)
        if message.payload == b"bad":
            raise ValueError("bad")

    give_up(url, order(b"bad"), order(b"good"), schema="inbox")

    consumer = consumer_of(sessions, handle, batch=10)
    assert await retry(consumer.retrier()) == Counter(succeeded=1, failed=1)
    assert effects(url) == ["good"]
    assert receipts(url) == 1
