"""A transaction with messages can be prepared while a relay sleeps."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import pillarbox
from outbox.postgres.advisory_lock import Lock
from outbox.postgres.connection import sqlalchemy_url
from outbox.postgres.doorbell import Doorbell
from pillarbox import Message, insert_statement
from tests.fixtures.added import topics
from tests.fixtures.sessions import execute

MESSAGES = [Message(topic, b"") for topic in "abc"]
BELLS = [
    (Lock.OUTBOX_DOORBELL, "outbox_message"),
    (Lock.INBOX_DOORBELL, "inbox_message"),
]


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "prepared_order"

    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture(autouse=True)
async def sleepers(database_url: str) -> AsyncIterator[None]:
    """Processes that sleep until they are notified, one for each doorbell."""
    bells = [
        Doorbell(database_url, lock=lock, channel=name, application_name="sleeper")
        for lock, name in BELLS
    ]
    for bell in bells:
        assert await bell.arm()
    yield
    for bell in bells:
        await bell.close()


@pytest.fixture(params=["psycopg", "psycopg2"])
def engine(request: pytest.FixtureRequest, database_url: str) -> Iterator[Engine]:
    url = sqlalchemy_url(database_url).replace("+psycopg", f"+{request.param}")
    engine = create_engine(url)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.mark.parametrize("count", [1, 3])
async def test_a_two_phase_session_commits_its_messages(
    database_url: str, engine: Engine, count: int
) -> None:
    with Session(engine, twophase=True) as session:
        session.add(Order(id=1))
        pillarbox.add(session, *MESSAGES[:count])
        session.flush()
        lost = session.begin_nested()
        pillarbox.add(session, Message("lost", b""))
        lost.rollback()
        pillarbox.add(session, Message("last", b""))
        session.prepare()
        session.commit()

    assert topics(database_url) == [*"abc"[:count], "last"]
    assert execute(database_url, "SELECT count(*) FROM prepared_order") == [(1,)]


async def test_a_session_that_joins_a_two_phase_connection_commits_its_messages(
    database_url: str, engine: Engine
) -> None:
    with engine.connect() as connection, connection.begin_twophase() as transaction:
        with Session(connection) as session:
            pillarbox.add(session, *MESSAGES)
            session.commit()
        connection.execute(insert_statement(Message("by statement", b"")))
        transaction.prepare()
        transaction.commit()

    assert topics(database_url) == [*"abc", "by statement"]


async def test_an_async_two_phase_session_commits_its_messages(
    database_url: str,
) -> None:
    engine = create_async_engine(sqlalchemy_url(database_url))
    async with AsyncSession(engine, twophase=True) as session:
        pillarbox.add(session, *MESSAGES)
        await session.commit()
    await engine.dispose()

    assert topics(database_url) == [*"abc"]


async def test_a_session_of_one_phase_executes_nothing_more(engine: Engine) -> None:
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    with Session(engine) as session, session.begin():
        pillarbox.add(session, *MESSAGES)

    assert len(seen) == 1


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT outbox.add('t', '{}'::jsonb)",
        # The trigger fires for a statement, not for a row.
        "INSERT INTO inbox.message SELECT * FROM inbox.message WHERE false",
    ],
)
async def test_a_transaction_in_sql_says_that_it_will_be_prepared(
    database_url: str, statement: str
) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("SET LOCAL pillarbox.two_phase = on")
        connection.execute(statement)
        connection.execute("PREPARE TRANSACTION 'in sql'")
    execute(database_url, "COMMIT PREPARED 'in sql'")
    with psycopg.connect(database_url) as connection:
        connection.execute(statement)
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="NOTIFY"):
            connection.execute("PREPARE TRANSACTION 'unsaid'")
