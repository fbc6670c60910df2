"""One consumer runs coroutine functions and plain functions, each with its sessions."""

import threading
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, TypeAlias

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from pillarbox import Consumer, Message, add
from pillarbox.inbox.handlers.sessions import make_executor, pool_limit
from pillarbox.inbox.testing.drain import drain
from pillarbox.outbox.dead_letters.retry import Candidate, retry_all
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.consumers import async_sessions_of, handles, sessions_of
from tests.fixtures.postgres import Template, new_database
from tests.fixtures.sessions import execute

Both: TypeAlias = tuple[async_sessionmaker[AsyncSession], sessionmaker[Session]]

PLACE = "postgresql+psycopg://db.example/{}"
LEASE = timedelta(seconds=30)
TOPICS: dict[str, dict[str, Any]] = {
    "async": {},
    "plain": {},
    "async.batch": {"batch": 5},
    "plain.batch": {"batch": 5},
    "async.job": {"lease": LEASE},
    "plain.job": {"lease": LEASE},
}


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

    def note(messages: Any) -> None:
        (message,) = messages if isinstance(messages, list) else [messages]
        ran[message.topic] = threading.get_ident() == loop

    async def handle_async(session_or_job: Any, messages: Any) -> None:
        if isinstance(session_or_job, AsyncSession):
            await session_or_job.execute(text("SELECT 1"))
        note(messages)

    def handle(session_or_job: Any, messages: Any) -> None:
        if isinstance(session_or_job, Session):
            session_or_job.execute(text("SELECT 1"))
        note(messages)

    for topic, terms in TOPICS.items():
        is_async = topic.startswith("async")
        handles(consumer, topic, **terms)(handle_async if is_async else handle)

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
    assert counts["succeeded"] == 2


def test_sessions_in_the_other_order_are_refused(both: Both) -> None:
    with pytest.raises(ConfigError, match="in this order"):
        Consumer("memory://", both[::-1], name="billing")  # type: ignore[arg-type]


def test_the_smaller_pool_limits_what_runs_at_once() -> None:
    url = PLACE.format("shop")
    sessions = async_sessionmaker(create_async_engine(url, pool_size=20))
    plain = sessionmaker(create_engine(url, pool_size=3, max_overflow=0))

    limit = pool_limit((sessions, plain))

    assert limit is not None
    assert limit.connections == 3


async def test_sessions_of_two_databases_are_refused(
    both: Both, server: PostgresServer, template: Template
) -> None:
    with (
        new_database(server, "pillarbox_other", template) as name,
        sessions_of(server.database_url(name)) as elsewhere,
    ):
        executor = make_executor((both[0], elsewhere), "billing", 1)

        with pytest.raises(ConfigError, match="different databases"):
            await executor.probe()
        await executor.close()
