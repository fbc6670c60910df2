"""`drain` delivers what a test has added to the application's own handlers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, sessionmaker

from examples.sealed.aes_gcm import AesGcm
from pillarbox import AsyncJob, Consumer, Job, Message, RetryLater, add
from pillarbox.inbox.testing.drain import drain
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.retry import RetryPolicy
from tests.fixtures.consumers import DRIVERS, async_sessions_of, is_plain, sessions_of
from tests.fixtures.sessions import execute

UNUSED = "memory://"
RECEIPTS = "SELECT count(*) FROM inbox.receipt"


@pytest.fixture
async def sessions(
    database_url: str,
) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    async with async_sessions_of(database_url) as sessions:
        yield sessions


def consumer_of(name: str, **settings: Any) -> Consumer:
    """Return a consumer as an application's module defines it."""
    return Consumer(UNUSED, async_sessionmaker(), name=name, **settings)


async def write(
    sessions: async_sessionmaker[AsyncSession], *messages: Message
) -> tuple[Message, ...]:
    async with sessions.begin() as session:
        add(session, *messages)
    return messages


async def test_messages_are_handled_in_order_and_so_is_what_handlers_add(
    sessions: async_sessionmaker[AsyncSession], database_url: str
) -> None:
    billing = consumer_of("billing", queues={"default": 1, "slow": 1})
    shipping = consumer_of("shipping")

    @billing.handles("orders.placed")
    async def bill(session: AsyncSession, message: Message) -> None:
        add(session, Message("orders.billed", message.json(), key=message.key))

    @billing.job("orders.paid", lease=timedelta(seconds=30), queue="slow")
    async def receipt(job: AsyncJob, message: Message) -> None:
        async with job.finish() as session:
            add(session, Message("receipts.printed", {}))

    @shipping.handles_batch("orders.*", max_size=10)
    async def ship(session: AsyncSession, messages: list[Message]) -> None:
        for message in messages:
            if message.topic == "orders.billed":
                add(session, Message("orders.paid", message.json(), key=message.key))

    await write(sessions, *(Message("orders.placed", n, key="k") for n in range(3)))
    drained = await drain(billing, shipping, sessions=sessions)

    assert sorted(drained.topics) == sorted(
        3 * ["orders.placed", "orders.placed", "orders.billed", "orders.paid"]
        + 3 * ["orders.paid"]
    )
    placed = [m.json() for m in drained.handled if m.topic == "orders.placed"]
    assert placed == [0, 1, 2, 0, 1, 2]
    assert [*drained.dead_lettered, *drained.duplicates, *drained.later] == []
    assert execute(database_url, RECEIPTS) == [(15,)]
    assert await drain(billing, shipping, sessions=sessions) == type(drained)()


async def test_a_message_that_fails_becomes_a_dead_letter_without_waiting(
    sessions: async_sessionmaker[AsyncSession], database_url: str
) -> None:
    hours = timedelta(hours=1)
    patient = RetryPolicy(max_attempts=3, first_delay=hours, max_delay=hours)
    calls: list[str] = []
    billing = consumer_of("billing", retry=patient, redact=str)

    @billing.handles("orders.*", retry=patient)
    async def bill(session: AsyncSession, message: Message) -> None:
        calls.append(message.topic)
        raise ValueError("no")

    @billing.handles("refunds.*")
    async def refund(session: AsyncSession, message: Message) -> None:
        calls.append(message.topic)
        raise ValueError("no")

    await write(sessions, Message("orders.placed", b""), Message("refunds.made", b""))
    drained = await drain(billing, sessions=sessions)

    assert sorted(calls) == 3 * ["orders.placed"] + 3 * ["refunds.made"]
    assert {letter.reason for letter in drained.dead_lettered} == {"ValueError: no"}
    assert execute(database_url, "SELECT attempts FROM inbox.dead_letter") == [(3,)] * 2
    assert (await drain(billing, sessions=sessions)).dead_lettered == []


async def test_a_message_that_is_to_be_retried_later_is_delivered_by_the_next_drain(
    sessions: async_sessionmaker[AsyncSession],
) -> None:
    billing = consumer_of("billing")
    is_paid = False

    @billing.handles("orders.placed")
    async def bill(session: AsyncSession, message: Message) -> None:
        if not is_paid:
            raise RetryLater(timedelta(days=1))

    messages = await write(sessions, Message("orders.placed", b""))
    drained = await drain(billing, sessions=sessions)
    assert [m.id for m in drained.later] == [messages[0].id]

    is_paid = True
    drained = await drain(billing, sessions=sessions)
    assert drained.topics == ["orders.placed"]


async def test_scheduled_messages_are_delivered_at_their_time(
    sessions: async_sessionmaker[AsyncSession],
) -> None:
    billing = consumer_of("billing")

    @billing.handles("*")
    async def remind(session: AsyncSession, message: Message) -> None: ...

    tomorrow = datetime.now(UTC) + timedelta(days=1)
    await write(sessions, Message("reminders", b"", available_at=tomorrow))

    assert (await drain(billing, sessions=sessions)).topics == []
    drained = await drain(billing, sessions=sessions, at=tomorrow)
    assert drained.topics == ["reminders"]


async def test_messages_of_a_key_are_delivered_in_the_order_in_which_they_become_due(
    sessions: async_sessionmaker[AsyncSession],
) -> None:
    billing = consumer_of("billing")

    @billing.handles("*")
    async def bill(session: AsyncSession, message: Message) -> None: ...

    now = datetime.now(UTC)
    hour = timedelta(hours=1)
    await write(
        sessions,
        Message("last", b"", key="k", available_at=now + 2 * hour),
        Message("in an hour", b"", key="k", available_at=now + hour),
        Message("also in an hour", b"", key="k", available_at=now + hour),
        Message("at once", b"", key="k"),
        Message("overdue", b"", key="k", available_at=now - hour),
    )

    drained = await drain(billing, sessions=sessions, at=now + 2 * hour)
    assert drained.topics == [
        *("at once", "overdue", "in an hour", "also in an hour", "last"),
    ]


async def test_a_moment_without_a_time_zone_is_refused(
    sessions: async_sessionmaker[AsyncSession],
) -> None:
    at = datetime.now(UTC).replace(tzinfo=None)
    with pytest.raises(ConfigError, match=r"at .*: is a naive datetime, which has no"):
        await drain(consumer_of("billing"), sessions=sessions, at=at)


async def test_plain_handlers_are_drained_with_plain_sessions(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    billing = Consumer(UNUSED, sessionmaker[Session](), name="billing")

    @billing.handles("orders.placed")
    def bill(session: Session, message: Message) -> None: ...

    await write(sessions, Message("orders.placed", b""))
    with sessions_of(database_url) as plain:
        assert (await drain(billing, sessions=plain)).topics == ["orders.placed"]
    await write(sessions, Message("orders.placed", b""))
    with pytest.raises(ConfigError, match="another kind of sessions for its handlers"):
        await drain(billing, sessions=sessions)


async def test_handlers_of_both_kinds_are_drained_with_a_tuple_of_both_sessions(
    database_url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    both = (async_sessionmaker[AsyncSession](), sessionmaker[Session]())
    billing = Consumer(UNUSED, both, name="billing")

    @billing.handles("orders.placed")
    async def bill(session: AsyncSession, message: Message) -> None:
        add(session, Message("orders.billed", b""))

    @billing.handles("orders.billed")
    def ship(session: Session, message: Message) -> None: ...

    await write(sessions, Message("orders.placed", b""))
    with sessions_of(database_url) as plain:
        drained = await drain(billing, sessions=(sessions, plain))
    assert drained.topics == ["orders.placed", "orders.billed"]


@asynccontextmanager
async def joined_to_a_transaction(
    url: str, driver: str, mode: str
) -> AsyncIterator[Any]:
    """Yield sessions as in SQLAlchemy's recipe for tests that leave nothing behind."""
    settings: dict[str, Any] = {"join_transaction_mode": mode}
    url = sqlalchemy_url(url).replace("psycopg", driver.split()[0], 1)
    if is_plain(driver):
        engine = create_engine(url)
        with engine.connect() as connection, connection.begin() as transaction:
            yield sessionmaker(connection, **settings)
            transaction.rollback()
        engine.dispose()
        return
    async_engine = create_async_engine(url)
    async with async_engine.connect() as joined, joined.begin() as outer:
        yield async_sessionmaker(joined, **settings)
        await outer.rollback()
    await async_engine.dispose()


@pytest.mark.parametrize("driver", DRIVERS)
async def test_sessions_of_one_connection_are_used_one_by_one(
    database_url: str, driver: str
) -> None:
    kinds: Any = sessionmaker() if is_plain(driver) else async_sessionmaker()
    billing = Consumer(UNUSED, kinds, name="billing", max_in_flight=8)
    failed: list[bytes] = []

    def place(session: Any, message: Message) -> None:
        if message.payload == b"2" or message.payload not in failed:
            failed.append(message.payload)
            raise ValueError("no")
        add(session, Message("orders.billed", message.payload))

    if is_plain(driver):
        billing.handles("orders.placed")(place)

        @billing.handles_batch("orders.billed", max_size=2)
        def ship(session: Session, messages: list[Message]) -> None:
            add(session, *(Message("orders.shipped", it.payload) for it in messages))

        @billing.job("orders.shipped", lease=timedelta(seconds=30))
        def report(job: Job, message: Message) -> None:
            with job.transaction() as session:
                session.execute(text("SELECT 1"))

    else:

        @billing.handles("orders.placed")
        async def place_async(session: AsyncSession, message: Message) -> None:
            await session.run_sync(place, message)

        @billing.handles_batch("orders.billed", max_size=2)
        async def ship_async(session: AsyncSession, messages: list[Message]) -> None:
            add(session, *(Message("orders.shipped", it.payload) for it in messages))

        @billing.job("orders.shipped", lease=timedelta(seconds=30))
        async def report_async(job: AsyncJob, message: Message) -> None:
            async with job.transaction() as session:
                await session.execute(text("SELECT 1"))

    async with joined_to_a_transaction(
        database_url, driver, "create_savepoint"
    ) as sessions:
        messages = [Message("orders.placed", str(n).encode()) for n in range(4)]
        if is_plain(driver):
            with sessions.begin() as session:
                add(session, *messages)
        else:
            async with sessions.begin() as session:
                add(session, *messages)
        drained = await drain(billing, sessions=sessions)
        assert sorted(drained.topics) == sorted(
            3 * ["orders.placed", "orders.billed", "orders.shipped"]
        )
        (letter,) = drained.dead_lettered
        assert letter.message.payload == b"2"
        assert letter.reason.startswith("ValueError")
    for table in ("outbox.message", "inbox.receipt", "inbox.dead_letter"):
        assert execute(database_url, f"SELECT count(*) FROM {table}") == [(0,)]


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only"])
async def test_sessions_that_would_roll_back_the_whole_test_are_refused(
    database_url: str, driver: str, mode: str
) -> None:
    kinds: Any = sessionmaker() if is_plain(driver) else async_sessionmaker()
    async with joined_to_a_transaction(database_url, driver, mode) as sessions:
        with pytest.raises(
            ConfigError, match='join_transaction_mode="create_savepoint"'
        ):
            await drain(Consumer(UNUSED, kinds, name="billing"), sessions=sessions)


async def test_an_encoded_message_is_refused_for_a_consumer_without_a_codec(
    sessions: async_sessionmaker[AsyncSession],
) -> None:
    codec = AesGcm({"here": AESGCM.generate_key(256)})
    async with sessions.begin() as session:
        add(session, Message("orders", b""), codec=codec)
    billing = consumer_of("billing")

    @billing.handles("orders")
    async def bill(session: AsyncSession, message: Message) -> None:
        """Handle anything."""

    with pytest.raises(ConfigError, match=r"no codec.*codec=codec"):
        await drain(billing, sessions=sessions)
