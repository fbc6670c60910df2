"""A consumer handles each message once and in order per key, whatever handlers do."""

import asyncio
import threading
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import StaticPool

from pillarbox import Consumer, DeadLetter, Message, RetryLater
from pillarbox.inbox.events import (
    DuplicateSkipped,
    HandlerDatabaseLost,
    HandlerDatabaseRecovered,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.errors import ConfigError, DatabaseUnavailableError
from pillarbox.outbox.postgres.connection import sqlalchemy_url
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
from tests.fixtures.effects import EFFECT, effects, note
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

DRIVERS = pytest.mark.parametrize("driver", ["psycopg async", "asyncpg"])


def dead_letters(url: str) -> list[tuple[Any, ...]]:
    return execute(
        url,
        "SELECT message_id, topic, key, attempts, error_reason, error_stacktrace"
        "  FROM inbox.dead_letter WHERE origin = 'consumer:billing'",
    )


@DRIVERS
async def test_each_message_is_handled_once_and_acked(url: str, driver: str) -> None:
    messages = numbered(20, keys=5)
    source = MemorySource(*messages, *messages)
    async with consuming(url, source, note, driver=driver, max_in_flight=4) as events:
        await events.wait_for(DuplicateSkipped, 20)
    assert effects(url) == sorted(str(n) for n in range(20))
    assert len(source.acked) == 40
    assert len(events.of(MessageHandled)) == 20


async def test_sync_handlers_run_in_threads_with_a_session(url: str) -> None:
    meet = threading.Barrier(2, timeout=30)

    def handle(session: Session, message: Message) -> None:
        meet.wait()  # fails unless both run at once
        session.execute(EFFECT, {"what": message.payload.decode()})

    source = MemorySource(*numbered(2, keys=2))
    async with consuming(url, source, handle, max_in_flight=2) as events:
        await events.wait_for(MessageHandled, 2)
    assert effects(url) == ["0", "1"]


def insert(session: Session, message: Message) -> None:
    session.execute(EFFECT, {"what": message.payload.decode()})


async def test_the_consumer_adds_the_receipt_and_nothing_else(url: str) -> None:
    # With one connection, which handlers need, a consumer doesn't record that it runs.
    engine = create_engine(sqlalchemy_url(url), poolclass=StaticPool)
    source, sessions = MemorySource(*numbered(3)), sessionmaker(engine)
    consumer = Consumer(source, sessions, name="billing", max_in_flight=1)
    consumer.handles("*")(insert)
    with recorded_statements(sessions) as seen:
        async with running(consumer) as events:
            await events.wait_for(MessageHandled, 3)
    engine.dispose()

    # At the start: how old is the schema, does the inbox exist, may it be written?
    # Then missing partitions are created, and the database is identified.
    start = [
        "-- Does: Read",
        "SELECT 1 FROM",
        "-- Does: Look",
        "-- Does: Create",
        "-- Does: Identify",
    ]
    start = [said for one in start for said in (one, "COMMIT")]
    handling = ["INSERT INTO inbox.receipt", "INSERT INTO effect", "COMMIT"]
    assert [" ".join(said.split()[:3]) for said in seen] == start + handling * 3


async def test_a_consumer_whose_pool_has_one_connection_records_that_it_runs(
    url: str,
) -> None:
    engine = create_engine(sqlalchemy_url(url), pool_size=1, max_overflow=0)
    consumer = Consumer(MemorySource(), sessionmaker(engine), name="billing")
    consumer.handles("*")(insert)
    query = "SELECT true FROM inbox.process WHERE name = 'billing'"
    async with running(consumer):
        await asyncio.to_thread(
            wait_for, "the consumer is recorded", lambda: execute(url, query)
        )
    engine.dispose()


async def test_messages_of_a_key_are_handled_in_order_and_keys_concurrently(
    url: str,
) -> None:
    seen: dict[str | None, list[int]] = defaultdict(list)
    failed_once: set[bytes] = set()

    async def handle(session: AsyncSession, message: Message) -> None:
        if message.payload not in failed_once and int(message.payload) % 7 == 0:
            failed_once.add(message.payload)
            raise RuntimeError("not yet")
        seen[message.key].append(int(message.payload))

    source = MemorySource(*numbered(60, keys=6))
    async with consuming(url, source, handle, max_in_flight=4, retry=QUICK) as events:
        await events.wait_for(MessageHandled, 60)
    assert len(failed_once) == 9
    assert {key: sorted(numbers) for key, numbers in seen.items()} == seen


async def test_a_key_waiting_for_a_retry_delays_no_other(url: str) -> None:
    bad = [Message("orders", b"bad", key="bad") for _ in range(10)]

    async def handle(session: AsyncSession, message: Message) -> None:
        if message.key == "bad":
            raise RuntimeError("bad")

    source = MemorySource(*bad, *numbered(10, keys=10))
    async with consuming(url, source, handle, max_in_flight=1, retry=NEVER) as events:
        await events.wait_for(MessageHandled, 10)
    assert len(events.of(HandlerFailed)) == 1


@DRIVERS
async def test_a_handler_that_raises_leaves_nothing_but_a_dead_letter(
    url: str, driver: str
) -> None:
    bad = Message("orders", b"\xff\x00", key="k", headers={"a": "b"})
    after = Message("orders", b"after", key="k")

    async def handle(session: AsyncSession, message: Message) -> None:
        if message.id == bad.id:
            await session.execute(EFFECT, {"what": "never"})
            raise RuntimeError("NUL \0 and \ud800" + "x" * 100_000)
        await note(session, message)

    source = MemorySource(bad, after)
    settings: dict[str, Any] = {"driver": driver, "retry": QUICK, "redact": str}
    async with consuming(url, source, handle, **settings) as events:
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
    url: str, batch: int | None, message: Message, reason: str
) -> None:
    async def handle(session: AsyncSession, one_or_many: Any) -> None:
        raise DeadLetter("the handler said so")

    source, terms = MemorySource(message), {"batch": batch}
    async with consuming(
        url, source, handle, terms, topic="orders", retry=NEVER, rollout=timedelta(0)
    ) as events:
        (event,) = await events.wait_for(MessageDeadLettered)
    assert reason in event.reason
    assert [letter[4] for letter in dead_letters(url)] == [event.reason]
    assert source.acked == [message]


async def test_retry_later_is_not_a_failure_and_waits(url: str) -> None:
    calls: list[bytes] = []

    async def handle(session: AsyncSession, message: Message) -> None:
        calls.append(message.payload)
        await note(session, message)
        if len(calls) < 8:
            raise RetryLater(timedelta(0), "not yet")

    async with consuming(
        url, MemorySource(*numbered(2)), handle, retry=NEVER
    ) as events:
        await events.wait_for(MessageHandled, 2)
    assert calls == [b"0"] * 8 + [b"1"]
    # It isn't called again at once, which would keep a core and the database busy.
    waits = [event.seconds_until_retry for event in events.of(RetryRequested)]
    assert len(waits) == 7
    assert all(0.01 <= wait <= 1 for wait in waits)
    assert effects(url) == ["0", "1"]


@DRIVERS
async def test_a_lost_connection_counts_no_attempt(url: str, driver: str) -> None:
    calls: list[Message] = []

    async def handle(session: AsyncSession, message: Message) -> None:
        calls.append(message)
        pid = await session.scalar(text("SELECT pg_backend_pid()"))
        if len(calls) == 1:
            execute(url, "SELECT pg_terminate_backend(%s)", (pid,))
        await note(session, message)

    source = MemorySource(*numbered(1))
    async with consuming(url, source, handle, driver=driver, retry=NEVER) as events:
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
