"""Connections in AUTOCOMMIT mode are refused: a rollback would keep the messages."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import pillarbox
from pillarbox import Message, insert_statement
from pillarbox.outbox.errors import AutocommitError
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from tests.fixtures.added import topics

# Who catches the error has to roll back, which these tests leave out.
AUTOCOMMIT = {"isolation_level": "AUTOCOMMIT"}
MESSAGES = [Message("orders.placed", {"order": n}) for n in range(3)]

SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "engine": (AUTOCOMMIT, {}, {}),
    "engine option": ({}, AUTOCOMMIT, {}),
    "connection option": ({}, {}, AUTOCOMMIT),
    "driver": ({"connect_args": {"autocommit": True}}, {}, {}),
}
"""Settings of the engine, its options and the connection."""
REFUSED = 'execution_options.*"AUTOCOMMIT".*in connect_args.*remove that setting'


def add_one(session: Session) -> None:
    pillarbox.add(session, MESSAGES[0])
    session.commit()


def add_many(session: Session) -> None:
    pillarbox.add(session, *MESSAGES)
    session.commit()


def execute_statement(session: Session) -> None:
    session.execute(insert_statement(*MESSAGES))


def execute_on_connection(session: Session) -> None:
    session.connection().execute(insert_statement(*MESSAGES))


WAYS = [add_one, add_many, execute_statement, execute_on_connection]


@contextmanager
def session_of(url: str, setting: str) -> Iterator[Session]:
    of_engine, of_options, of_connection = SETTINGS[setting]
    engine = create_engine(sqlalchemy_url(url), **of_engine)
    try:
        with Session(engine.execution_options(**of_options)) as session:
            session.connection(execution_options=of_connection)
            yield session
    finally:
        engine.dispose()


@asynccontextmanager
async def async_session_of(
    url: str, driver: str, setting: str
) -> AsyncIterator[AsyncSession]:
    of_engine, of_options, of_connection = SETTINGS[setting]
    url = sqlalchemy_url(url).replace("psycopg", driver, 1)
    engine = create_async_engine(url, **of_engine)
    try:
        async with AsyncSession(engine.execution_options(**of_options)) as session:
            await session.connection(execution_options=of_connection)
            yield session
    finally:
        await engine.dispose()


@pytest.mark.parametrize("setting", SETTINGS)
def test_autocommit_is_refused(database_url: str, setting: str) -> None:
    for way in WAYS:
        with (
            session_of(database_url, setting) as session,
            pytest.raises(AutocommitError, match=REFUSED),
        ):
            way(session)
        assert (way, topics(database_url)) == (way, [])


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_autocommit_is_refused_in_an_async_session(
    database_url: str, driver: str
) -> None:
    for setting in sorted({*SETTINGS} - {"driver"}):
        for way in WAYS:
            async with async_session_of(database_url, driver, setting) as session:
                with pytest.raises(AutocommitError, match=REFUSED):
                    await session.run_sync(way)
            assert (setting, way, topics(database_url)) == (setting, way, [])


def test_refused_messages_are_retried_and_not_skipped(database_url: str) -> None:
    with session_of(database_url, "engine") as session:
        pillarbox.add(session, *MESSAGES)
        for _ in range(2):
            with pytest.raises(AutocommitError, match="a rollback keeps the messages"):
                session.flush()
    assert topics(database_url) == []


def test_an_autocommit_engine_adds_messages_in_their_own_transaction(
    database_url: str,
) -> None:
    engine = create_engine(sqlalchemy_url(database_url), isolation_level="AUTOCOMMIT")
    transactional = engine.execution_options(isolation_level="READ COMMITTED")
    with Session(transactional) as session, session.begin():
        pillarbox.add(session, MESSAGES[0])
    with transactional.connect() as connection:
        connection.execute(insert_statement(MESSAGES[1]))
        connection.rollback()
    engine.dispose()
    assert topics(database_url) == ["orders.placed"]
