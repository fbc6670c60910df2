"""Features that need no session work through a pooler in transaction mode."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, sessionmaker

import pillarbox
from pillarbox import Consumer, Message, guard, uuid7
from pillarbox.inbox.events import MessageHandled
from pillarbox.inbox.jobs.job import AsyncJob
from pillarbox.outbox.administration.migrate import migrate
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.testing.postgres import PostgresServer
from pillarbox.relay.events import BatchSettled
from pillarbox.relay.publishers.memory import MemoryPublisher
from tests.fixtures import consumers, jobs
from tests.fixtures.effects import effects, note, receipts
from tests.fixtures.pgbouncer import Pooled, pgbouncer
from tests.fixtures.postgres import A_WEEK, one_at_a_time
from tests.fixtures.relay import insert, running, unsettled
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

# More often than psycopg executes a statement before preparing it.
ROUNDS = 12
DEFAULT_PATH = '"$user", public'


@pytest.fixture
def url(pooled: Pooled, database_url: str) -> str:
    """Return the URL of a pool that assigns its sessions in turns."""
    execute(database_url, "CREATE TABLE effect (what text)")
    return pooled("transaction", server_round_robin=1, max_client_conn=100)


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """Create an engine as documented for psycopg."""
    engine = create_engine(
        sqlalchemy_url(url), connect_args={"prepare_threshold": None}
    )
    yield engine
    engine.dispose()


@pytest.fixture(params=["psycopg", "asyncpg"])
async def async_sessions(
    url: str, request: pytest.FixtureRequest
) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    """Create sessions as documented for each driver."""
    if request.param == "psycopg":
        engine = create_async_engine(
            sqlalchemy_url(url), connect_args={"prepare_threshold": None}
        )
    else:
        engine = create_async_engine(
            sqlalchemy_url(url).replace("+psycopg", "+asyncpg"),
            connect_args={
                "statement_cache_size": 0,
                "prepared_statement_cache_size": 0,
            },
        )
    yield async_sessionmaker(engine)
    await engine.dispose()


def test_messages_are_added_and_guarded_with_their_transactions(
    engine: Engine, database_url: str
) -> None:
    with Session(engine) as one, Session(engine) as other:
        for number in range(ROUNDS):
            for session in (one, other):
                pillarbox.add(session, Message("kept", str(number).encode()))
                session.flush()
            one.commit()
            other.commit()
            pillarbox.add(one, Message("lost", b""))
            one.flush()
            one.rollback()
    topics = execute(
        database_url, "SELECT topic, count(*) FROM outbox.message GROUP BY 1"
    )
    assert topics == [("kept", 2 * ROUNDS)]

    sessions = sessionmaker(engine)
    ids = [uuid7() for _ in range(ROUNDS)]
    new = []
    for id in ids * 2:
        with sessions.begin() as session, guard(session, id, consumer="a") as is_new:
            new.append(is_new)
    assert new == [True] * ROUNDS + [False] * ROUNDS


async def test_messages_are_added_and_guarded_by_async_sessions(
    async_sessions: async_sessionmaker[AsyncSession], url: str, database_url: str
) -> None:
    async def write(writer: int) -> None:
        for number in range(ROUNDS):
            async with async_sessions.begin() as session:
                pillarbox.add(session, Message("orders", {"n": [writer, number]}))

    await asyncio.gather(*map(write, range(4)))
    assert unsettled(database_url) == 4 * ROUNDS

    async def handle(id: UUID) -> bool:
        async with (
            async_sessions.begin() as session,
            guard(session, id, consumer="a") as is_new,
        ):
            return is_new

    ids = [uuid7() for _ in range(ROUNDS)]
    outcomes = await asyncio.gather(*map(handle, ids + ids))
    assert sorted(outcomes) == [False] * ROUNDS + [True] * ROUNDS
    # No prepared statement is left in a session for its next client.
    prepared = "SELECT name FROM pg_prepared_statements"
    assert [execute(url, prepared) for _ in range(ROUNDS)] == [[]] * ROUNDS


async def test_a_sleeping_relay_is_woken(engine: Engine, database_url: str) -> None:
    publisher = MemoryPublisher()
    asleep = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 100"
    async with running(
        database_url, publisher, poll_interval=timedelta(hours=1)
    ) as relaying:
        await asyncio.to_thread(
            wait_for, "the relay sleeps", lambda: execute(database_url, asleep)[0][0]
        )
        with Session(engine) as session, session.begin():
            pillarbox.add(session, message := Message("orders", b""))
        await relaying.events.wait_for(BatchSettled)
    assert publisher.messages == [message]


async def test_handlers_work_through_a_pooler_if_the_broker_url_is_direct(
    async_sessions: async_sessionmaker[AsyncSession], database_url: str
) -> None:
    consumer = Consumer(database_url, async_sessions, name="billing")
    consumer.handles("orders")(note)
    async with consumers.running(consumer):
        insert(database_url, *consumers.numbered(ROUNDS * 2))
        await asyncio.to_thread(
            wait_for, "all", lambda: len(effects(database_url)) == ROUNDS * 2
        )
    assert receipts(database_url) == ROUNDS * 2


async def test_long_handlers_work_through_a_pooler(
    async_sessions: async_sessionmaker[AsyncSession], database_url: str
) -> None:
    message = Message(jobs.TOPIC, b"")
    consumer = jobs.consumer_of(async_sessions, message)

    @consumer.job(jobs.TOPIC, lease=jobs.LEASE)
    async def render(job: AsyncJob, message: Message) -> None:
        for page in range(ROUNDS):
            await jobs.note(job, f"page {page}")
            await job.save(page + 1)
        async with job.finish() as session:
            pillarbox.add(session, Message("reports.ready", b""))

    async with consumers.running(consumer) as events:
        await events.wait_for(MessageHandled)
    assert len(effects(database_url)) == ROUNDS
    assert jobs.job_of(database_url)[0] == "success"
    assert unsettled(database_url) == 1


def paths(url: str) -> set[str]:
    """Return the search paths that the pool's sessions keep for their next clients."""
    return {execute(url, "SHOW search_path")[0][0] for _ in range(ROUNDS)}


def test_a_migration_in_its_own_transaction_works_through_a_pooler(
    empty_database_url: str, server: PostgresServer
) -> None:
    with pgbouncer(empty_database_url, "transaction", server_round_robin=1) as url:
        engine = create_engine(
            sqlalchemy_url(url), connect_args={"prepare_threshold": None}
        )
        with one_at_a_time(server), engine.begin() as connection:
            migrate(connection, with_cron=False, days_ahead=A_WEEK)
        with engine.begin() as connection:
            assert connection.scalar(text("SELECT current_user = session_user"))
        engine.dispose()
        assert paths(url) == {DEFAULT_PATH}
    assert unsettled(empty_database_url) == 0
