"""One consumer runs coroutine functions and plain functions, each with its sessions."""

import threading
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import TypeAlias

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from inbox.handlers.sessions import make_executor, pool_limit
from inbox.testing.drain import drain
from outbox.dead_letters.retry import Candidate, retry_all
from outbox.errors import ConfigError
from outbox.testing.postgres import PostgresServer
from pillarbox import AsyncJob, Consumer, Job, Message, add
from tests.fixtures.consumers import async_sessions_of, sessions_of
from tests.fixtures.postgres import Template, new_database
from tests.fixtures.sessions import execute

Both: TypeAlias = tuple[async_sessionmaker[AsyncSession], sessionmaker[Session]]

PLACE = "postgresql+psycopg://db.example/{}"
TOPICS = ("async", "plain", "async.batch", "plain.batch", "async.job", "plain.job")
LEASE = timedelta(seconds=30)


@pytest.fixture
async def both(database_url: str) -> AsyncIterator[Both]:
    with sessions_of(database_url) as plain:
        async with async_sessions_of(database_url) as sessions:
            yield sessions, plain


async def test_each_handler_gets_what_its_kind_gets(
    both: Both, database_url: str
) -> None:
    consumer = Consumer("memory://", both, name="billing")
    loop = threading.get_ident()
    ran: dict[str, bool] = {}

    def note(topic: str) -> None:
        ran[topic] = threading.get_ident() == loop

    @consumer.handles("async")
    async def one(session: AsyncSession, message: Message) -> None:
        await session.execute(text("SELECT 1"))
        note("async")

    @consumer.handles("plain")
    def two(session: Session, message: Message) -> None:
        session.execute(text("SELECT 1"))
        note("plain")

    @consumer.handles_batch("async.batch", max_size=5)
    async def three(session: AsyncSession, messages: list[Message]) -> None:
        note("async.batch")

    @consumer.handles_batch("plain.batch", max_size=5)
    def four(session: Session, messages: list[Message]) -> None:
        note("plain.batch")

    @consumer.job("async.job", lease=LEASE)
    async def five(job: AsyncJob, message: Message) -> None:
        note("async.job")

    @consumer.job("plain.job", lease=LEASE)
    def six(job: Job, message: Message) -> None:
        note("plain.job")

    with both[1].begin() as session:
        add(session, *(Message(topic, {}) for topic in TOPICS))

    drained = await drain(consumer, sessions=both)

    assert sorted(drained.topics) == sorted(TOPICS)
    assert ran == {topic: topic.startswith("async") for topic in TOPICS}
    receipts = "SELECT count(*) FROM inbox.receipt"
    assert execute(database_url, receipts) == [(len(TOPICS),)]


async def test_a_dead_letter_of_each_kind_can_be_retried(
    both: Both, database_url: str
) -> None:
    consumer = Consumer("memory://", both, name="billing")
    broken = True

    @consumer.handles("async")
    async def one(session: AsyncSession, message: Message) -> None:
        if broken:
            raise LookupError

    @consumer.handles("plain")
    def two(session: Session, message: Message) -> None:
        if broken:
            raise LookupError

    with both[1].begin() as session:
        add(session, Message("async", {}), Message("plain", {}))
    drained = await drain(consumer, sessions=both)
    assert len(drained.dead_lettered) == 2

    broken = False
    letters = execute(database_url, "SELECT id, created_at FROM inbox.dead_letter")
    async with consumer.retrier() as retrier:
        counts = await retry_all(retrier, [Candidate(*row) for row in letters])
    assert counts.succeeded == 2


def test_sessions_in_the_other_order_are_refused(both: Both) -> None:
    with pytest.raises(ConfigError, match="in this order"):
        Consumer("memory://", both[::-1], name="billing")  # type: ignore[arg-type]


async def test_sessions_of_two_databases_are_refused(
    both: Both, server: PostgresServer, template: Template
) -> None:
    with (
        new_database(server, "pillarbox_other", template) as name,
        sessions_of(server.database_url(name)) as elsewhere,
    ):
        executor = make_executor((both[0], elsewhere), "billing", 1)

        with pytest.raises(ConfigError, match="for different databases"):
            await executor.probe()
        await executor.close()


def test_the_smaller_pool_limits_what_runs_at_once() -> None:
    url = PLACE.format("shop")
    sessions = async_sessionmaker(create_async_engine(url, pool_size=20))
    plain = sessionmaker(create_engine(url, pool_size=3, max_overflow=0))

    limit = pool_limit((sessions, plain))

    assert limit is not None
    assert limit.connections == 3
