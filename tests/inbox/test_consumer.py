"""A consumer handles each message once and in order per key, whatever handlers do."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session

from inbox.events import (
    DuplicateSkipped,
    HandlerDatabaseLost,
    HandlerDatabaseRecovered,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from inbox.sources.memory import MemorySource
from outbox.errors import ConfigError, DatabaseUnavailableError
from pillarbox import Consumer, DeadLetter, Message, RetryLater, idempotent
from tests.fixtures.consumers import (
    NEVER,
    QUICK,
    async_sessions_of,
    handles,
    id_of,
    numbered,
    running,
    sessions_of,
)
from tests.fixtures.sessions import execute

EFFECT = text("INSERT INTO effect (what) VALUES (:what)")


@pytest.fixture
def url(database_url: str) -> str:
    execute(database_url, "CREATE TABLE effect (what text)")
    return database_url


@pytest.fixture(params=["psycopg", "asyncpg"])
async def sessions(
    url: str, request: pytest.FixtureRequest
) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    async with async_sessions_of(url, request.param) as made:
        yield made


def effects(url: str) -> list[str]:
    return [what for (what,) in execute(url, "SELECT what FROM effect ORDER BY what")]


def dead_letters(url: str) -> list[tuple[Any, ...]]:
    return execute(
        url,
        "SELECT message_id, topic, key, attempts, error_reason, error_stacktrace"
        "  FROM inbox.dead_letter WHERE origin = 'consumer:billing'",
    )


async def note(session: AsyncSession, message: Message) -> None:
    await session.execute(EFFECT, {"what": message.payload.decode()})


async def test_each_message_is_handled_once_and_acked(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    messages = numbered(20, keys=5)
    source = MemorySource(*messages, *messages)
    consumer = Consumer(source, sessions, name="billing", max_in_flight=4)
    consumer.handles("orders")(note)
    async with running(consumer) as events:
        await events.wait_for(DuplicateSkipped, 20)
    assert effects(url) == sorted(str(n) for n in range(20))
    assert len(source.acked) == 40
    assert len(events.of(MessageHandled)) == 20


def test_sync_handlers_run_in_threads_with_a_session(url: str) -> None:
    meet = threading.Barrier(2, timeout=30)

    def handle(session: Session, message: Message) -> None:
        meet.wait()  # fails unless both run at once
        session.execute(EFFECT, {"what": message.payload.decode()})

    async def consume() -> None:
        with sessions_of(url) as sessions:
            source = MemorySource(*numbered(2, keys=2))
            consumer = Consumer(source, sessions, name="billing", max_in_flight=2)
            consumer.handles("orders")(handle)
            async with running(consumer) as events:
                await events.wait_for(MessageHandled, 2)

    asyncio.run(consume())
    assert effects(url) == ["0", "1"]


async def test_messages_of_a_key_are_handled_in_order_and_keys_concurrently(
    sessions: async_sessionmaker[AsyncSession],
) -> None:
    seen: dict[str | None, list[int]] = defaultdict(list)
    failed_once: set[bytes] = set()
    consumer = Consumer(
        MemorySource(*numbered(60, keys=6)),
        sessions,
        name="billing",
        max_in_flight=4,
        retry=QUICK,
    )

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        if message.payload not in failed_once and int(message.payload) % 7 == 0:
            failed_once.add(message.payload)
            raise RuntimeError("not yet")
        seen[message.key].append(int(message.payload))

    async with running(consumer) as events:
        await events.wait_for(MessageHandled, 60)
    assert len(failed_once) == 9
    assert {key: sorted(numbers) for key, numbers in seen.items()} == seen


async def test_a_key_waiting_for_a_retry_delays_no_other(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    bad = [Message("orders", b"bad", key="bad") for _ in range(10)]
    consumer = Consumer(
        MemorySource(*bad, *numbered(10, keys=10)),
        sessions,
        name="billing",
        max_in_flight=1,
        retry=NEVER,
        drain=timedelta(seconds=10),
    )

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        if message.key == "bad":
            raise RuntimeError("bad")
        await note(session, message)

    async with running(consumer) as events:
        await events.wait_for(MessageHandled, 10)
    assert len(events.of(HandlerFailed)) == 1


async def test_a_handler_that_raises_leaves_nothing_but_a_dead_letter(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    bad = Message("orders", b"\xff\x00", key="k", headers={"a": "b"})
    after = Message("orders", b"after", key="k")
    source = MemorySource(bad, after)
    consumer = Consumer(source, sessions, name="billing", retry=QUICK)

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        if message.id == bad.id:
            await session.execute(EFFECT, {"what": "never"})
            raise RuntimeError("NUL \0 and \ud800" + "x" * 100_000)
        await note(session, message)

    async with running(consumer) as events:
        await events.wait_for(MessageHandled)
    (letter,) = dead_letters(url)
    assert letter[:4] == (str(bad.id), "orders", "k", 3)
    assert letter[4].startswith(r"RuntimeError: NUL \0 and \ud800xxx")
    assert letter[5].startswith("Traceback")
    assert len(letter[5]) <= 16 * 1024
    assert effects(url) == ["after"]
    receipts = execute(url, "SELECT message_id FROM inbox.receipt")
    assert receipts == [(after.id,)]
    assert source.acked == [bad, after]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("unknown", b""), "has no handler for topic 'unknown'"),
        (
            Message("orders", b"", id=id_of(datetime(2020, 1, 1, tzinfo=UTC))),
            "MessageTooOldError",
        ),
        (
            Message("orders", b"", id=id_of(datetime(2120, 1, 1, tzinfo=UTC))),
            "MessageTooNewError",
        ),
        (
            Message("orders", b"", id=id_of(datetime.now(UTC), version=4)),
            "isn't a UUIDv7",
        ),
        (Message("orders", b"give up"), "DeadLetter: the handler said so"),
    ],
    ids=["no handler", "too old", "too new", "no uuid7", "DeadLetter"],
)
@pytest.mark.parametrize("batch", [None, 2], ids=["single", "batch"])
async def test_a_message_that_can_never_be_handled_is_dead_lettered_at_once(
    url: str,
    sessions: async_sessionmaker[AsyncSession],
    batch: int | None,
    message: Message,
    reason: str,
) -> None:
    source = MemorySource(message)
    consumer = Consumer(source, sessions, name="billing", retry=NEVER)

    @handles(consumer, "orders", batch=batch)
    async def handle(session: AsyncSession, one_or_many: Any) -> None:
        raise DeadLetter("the handler said so")

    async with running(consumer) as events:
        (event,) = await events.wait_for(MessageDeadLettered)
    assert reason in event.reason
    assert [letter[4] for letter in dead_letters(url)] == [event.reason]
    assert source.acked == [message]


async def test_retry_later_is_not_a_failure(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    calls: list[bytes] = []
    consumer = Consumer(
        MemorySource(*numbered(2)), sessions, name="billing", retry=NEVER
    )

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        calls.append(message.payload)
        await note(session, message)
        if len(calls) < 20:
            raise RetryLater(timedelta(milliseconds=1), "not yet")

    async with running(consumer) as events:
        await events.wait_for(MessageHandled, 2)
    assert calls == [b"0"] * 20 + [b"1"]
    assert len(events.of(RetryRequested)) == 19
    assert effects(url) == ["0", "1"]


async def test_an_idempotent_handler_records_only_its_own_receipt(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = Consumer(MemorySource(*numbered(1)), sessions, name="billing")
    consumer.handles("orders")(idempotent(consumer="ledger")(note))
    async with running(consumer) as events:
        await events.wait_for(MessageHandled)
    assert execute(url, "SELECT consumer FROM inbox.receipt") == [("ledger",)]


async def test_a_lost_connection_counts_no_attempt(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    calls: list[Message] = []
    consumer = Consumer(
        MemorySource(*numbered(1)), sessions, name="billing", retry=NEVER
    )

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        calls.append(message)
        pid = await session.scalar(text("SELECT pg_backend_pid()"))
        if len(calls) == 1:
            execute(url, "SELECT pg_terminate_backend(%s)", (pid,))
        await note(session, message)

    async with running(consumer) as events:
        await events.wait_for(MessageHandled)
        await events.wait_for(HandlerDatabaseRecovered)
    assert len(events.of(HandlerDatabaseLost)) == 1
    assert events.of(HandlerFailed) == []
    assert effects(url) == ["0"]


async def test_a_database_without_the_inbox_is_refused_at_start(
    empty_database_url: str,
) -> None:
    async with async_sessions_of(empty_database_url) as sessions:
        consumer = Consumer(MemorySource(), sessions, name="billing")
        consumer.handles("orders")(note)
        with pytest.raises(ConfigError, match="run pillarbox migrate"):
            await consumer.run()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_an_unavailable_database_is_reported_at_start(driver: str) -> None:
    url = "postgresql://nobody@127.0.0.1:1/nothing"
    async with async_sessions_of(url, driver) as sessions:
        consumer = Consumer(MemorySource(), sessions, name="billing")
        consumer.handles("orders")(note)
        with pytest.raises(DatabaseUnavailableError, match="can't read the inbox"):
            await consumer.run()
