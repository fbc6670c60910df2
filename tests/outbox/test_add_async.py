"""Messages in the transaction of an AsyncSession, over psycopg and asyncpg."""

from collections.abc import AsyncIterator, Iterator

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import scoped_session, sessionmaker

import pillarbox
from outbox.postgres.connection import sqlalchemy_url
from pillarbox import Message
from tests.fixtures.added import FULL, MESSAGES, STORED, fields, topics
from tests.fixtures.sessions import execute


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = create_engine(sqlalchemy_url(database_url))
    yield engine
    engine.dispose()


@pytest.fixture(params=["psycopg", "asyncpg"])
async def async_sessions(
    request: pytest.FixtureRequest, database_url: str
) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    engine = create_async_engine(
        sqlalchemy_url(database_url).replace("+psycopg", f"+{request.param}")
    )
    yield async_sessionmaker(engine)
    await engine.dispose()


async def test_every_field_arrives_by_an_async_session_and_by_its_connection(
    database_url: str, async_sessions: async_sessionmaker[AsyncSession]
) -> None:
    async with async_sessions.begin() as session:
        pillarbox.add(session, FULL)
    assert execute(database_url, STORED) == [fields(FULL)]

    async with async_sessions.begin() as session:
        pillarbox.add(session, *MESSAGES, FULL)
    assert topics(database_url)[1:] == ["t0", "t1", "t2", "orders.placed"]
    assert execute(database_url, STORED) == [fields(FULL)]

    async with async_sessions.begin() as session:
        connection = await session.connection()
        await connection.execute(pillarbox.insert_statement(*MESSAGES, FULL))
    assert topics(database_url)[5:] == ["t0", "t1", "t2", "orders.placed"]
    assert execute(database_url, STORED) == [fields(FULL)]


async def test_a_rolled_back_savepoint_removes_its_messages_async(
    database_url: str, async_sessions: async_sessionmaker[AsyncSession]
) -> None:
    async with async_sessions.begin() as session:
        pillarbox.add(session, Message("kept", b""))
        savepoint = await session.begin_nested()
        pillarbox.add(session, Message("pending", b""))
        await savepoint.rollback()
        async with session.begin_nested():
            pillarbox.add(session, Message("kept too", b""))

    assert topics(database_url) == ["kept", "kept too"]


async def test_scoped_sessions_are_sessions(
    database_url: str,
    engine: Engine,
    async_sessions: async_sessionmaker[AsyncSession],
) -> None:
    scoped = scoped_session(sessionmaker(engine))
    pillarbox.add(scoped, Message("sync", b""))
    scoped.commit()
    scoped.remove()
    async_scoped = async_scoped_session(async_sessions, scopefunc=lambda: 1)
    pillarbox.add(async_scoped, Message("async", b""))
    await async_scoped.commit()
    await async_scoped.remove()

    assert topics(database_url) == ["sync", "async"]
