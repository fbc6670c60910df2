"""A transaction with messages can be prepared while a relay sleeps."""

from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import pillarbox
from pillarbox import Message, insert_statement
from pillarbox.outbox.postgres.advisory_lock import Lock
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.postgres.doorbell import Doorbell
from tests.fixtures.added import topics
from tests.fixtures.sessions import execute

MESSAGES = [Message(topic, b"") for topic in "abc"]


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "prepared_order"

    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture(autouse=True)
async def sleeper(database_url: str) -> AsyncIterator[None]:
    """A process that sleeps until it is notified."""
    bell = Doorbell(
        database_url,
        lock=Lock.OUTBOX_DOORBELL,
        channel="outbox_message",
        application_name="sleeper",
    )
    assert await bell.arm()
    yield
    await bell.close()


@pytest.fixture(params=["psycopg", "psycopg2"])
def engine(request: pytest.FixtureRequest, database_url: str) -> Iterator[Engine]:
    url = sqlalchemy_url(database_url).replace("+psycopg", f"+{request.param}")
    engine = create_engine(url)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


async def test_a_two_phase_session_commits_its_messages(
    database_url: str, engine: Engine
) -> None:
    for id, count in enumerate((1, 3)):
        with Session(engine, twophase=True) as session:
            session.add(Order(id=id))
            pillarbox.add(session, *MESSAGES[:count])
            session.flush()
            lost = session.begin_nested()
            pillarbox.add(session, Message("lost", b""))
            lost.rollback()
            pillarbox.add(session, Message("last", b""))
            session.prepare()
            session.commit()
    assert topics(database_url) == ["a", "last", *"abc", "last"]
    assert execute(database_url, "SELECT count(*) FROM prepared_order") == [(2,)]

    with engine.connect() as connection, connection.begin_twophase() as transaction:
        with Session(connection) as session:
            pillarbox.add(session, Message("by a session that joins it", b""))
            session.commit()
        connection.execute(insert_statement(Message("by statement", b"")))
        transaction.prepare()
        transaction.commit()
    joined = ["by a session that joins it", "by statement"]
    assert topics(database_url)[-2:] == joined


async def test_an_async_two_phase_session_commits_its_messages(
    database_url: str,
) -> None:
    engine = create_async_engine(sqlalchemy_url(database_url))
    async with AsyncSession(engine, twophase=True) as session:
        pillarbox.add(session, *MESSAGES)
        await session.commit()
    await engine.dispose()

    assert topics(database_url) == [*"abc"]


async def test_a_transaction_in_sql_says_that_it_will_be_prepared(
    database_url: str,
) -> None:
    for statement in (
        "SELECT outbox.add('t', '{}'::jsonb)",
        # The trigger fires for a statement, not for a row.
        "INSERT INTO outbox.message SELECT * FROM outbox.message WHERE false",
    ):
        with psycopg.connect(database_url) as connection:
            connection.execute("SET LOCAL pillarbox.two_phase = on")
            connection.execute(statement)
            connection.execute("PREPARE TRANSACTION 'in sql'")
        execute(database_url, "COMMIT PREPARED 'in sql'")
        with psycopg.connect(database_url) as connection:
            connection.execute(statement)
            with pytest.raises(psycopg.errors.FeatureNotSupported, match="NOTIFY"):
                connection.execute("PREPARE TRANSACTION 'unsaid'")
