"""Messages in the caller's own transaction, with each session and driver."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeAlias

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)

import pillarbox
from pillarbox import InvalidMessageError, Message
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from tests.fixtures.added import FULL, MESSAGES, STORED, fields, topics
from tests.fixtures.sessions import execute


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "shop_order"

    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = create_engine(sqlalchemy_url(database_url))
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def statements(engine: Engine) -> list[str]:
    """List the statements that this engine executes."""
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    return seen


Work: TypeAlias = Callable[[Session], None]


@pytest.mark.parametrize("messages", [[FULL], [*MESSAGES, FULL]], ids=["one", "many"])
def test_every_field_arrives_by_one_insert_without_returning(
    database_url: str, engine: Engine, statements: list[str], messages: list[Message]
) -> None:
    with Session(engine) as session, session.begin():
        pillarbox.add(session, *messages)

    (insert,) = statements
    assert "INSERT INTO outbox.message" in insert
    assert "RETURNING" not in insert
    assert execute(database_url, STORED) == [fields(FULL)]


def test_many_calls_make_one_insert_without_returning(
    database_url: str, engine: Engine, statements: list[str]
) -> None:
    with Session(engine) as session, session.begin():
        session.add(Order(id=1))
        for message in MESSAGES:
            pillarbox.add(session, message)
        pillarbox.add(session, FULL, Message("last", b""))

    (insert,) = [it for it in statements if "outbox.message" in it]
    assert "RETURNING" not in insert
    assert topics(database_url) == ["t0", "t1", "t2", "orders.placed", "last"]


def test_seq_follows_the_order_of_adding(database_url: str, engine: Engine) -> None:
    expected = [f"t{n}" for n in range(500)]

    with Session(engine) as session, session.begin():
        for n in range(0, 500, 50):
            pillarbox.add(session, *[Message(f"t{i}", b"") for i in range(n, n + 50)])
            if n % 100 == 0:
                session.flush()

    assert topics(database_url) == expected


def undo_by_rollback(session: Session) -> None:
    session.rollback()


def undo_by_flush_and_rollback(session: Session) -> None:
    session.flush()
    session.rollback()


def undo_by_close(session: Session) -> None:
    session.flush()
    session.close()


def undo_by_expunging_and_rollback(session: Session) -> None:
    session.expunge_all()
    session.rollback()


def test_after_a_rollback_nothing_is_added_and_the_session_is_usable(
    database_url: str, engine: Engine
) -> None:
    undoings: list[Work] = [
        undo_by_rollback,
        undo_by_flush_and_rollback,
        undo_by_close,
        undo_by_expunging_and_rollback,
    ]
    for number, undo in enumerate(undoings, start=1):
        with Session(engine) as session:
            pillarbox.add(session, Message("undone", b""))
            undo(session)
            session.commit()
            pillarbox.add(session, Message("kept", b""))
            session.commit()
        assert topics(database_url) == ["kept"] * number


@pytest.mark.filterwarnings("ignore:New instance <Order")
def test_a_failed_statement_rolls_back_the_messages(
    database_url: str, engine: Engine
) -> None:
    with Session(engine) as session:
        pillarbox.add(session, *MESSAGES)
        session.add_all([Order(id=1), Order(id=1)])
        with pytest.raises(SQLAlchemyError):
            session.commit()

    assert topics(database_url) == []


def test_savepoints_keep_or_roll_back_their_messages(
    database_url: str, engine: Engine
) -> None:
    with Session(engine) as session, session.begin():
        pillarbox.add(session, Message("outer", b""))
        with session.begin_nested():
            pillarbox.add(session, Message("released", b""))
            inner = session.begin_nested()
            pillarbox.add(session, Message("flushed and lost", b""))
            session.flush()
            pillarbox.add(session, Message("pending and lost", b""))
            inner.rollback()
            pillarbox.add(session, Message("after", b""))
        lost = session.begin_nested()
        pillarbox.add(session, Message("lost", b""))
        lost.rollback()
        pillarbox.add(session, Message("last", b""))

    assert topics(database_url) == ["outer", "released", "after", "last"]


def test_flushed_messages_are_visible_only_in_their_transaction(
    database_url: str, engine: Engine
) -> None:
    count = text("SELECT count(*) FROM outbox.message")
    with Session(engine) as session, session.begin():
        pillarbox.add(session, *MESSAGES)
        with session.no_autoflush:
            assert session.scalar(count) == 0
        session.query(Order).all()  # flushes
        assert session.scalar(count) == 3
        assert topics(database_url) == []
    assert len(topics(database_url)) == 3


def test_a_refused_message_leaves_the_transaction_usable(
    database_url: str, engine: Engine
) -> None:
    with Session(engine) as session, session.begin():
        pillarbox.add(session, Message("before", b""))
        with pytest.raises(InvalidMessageError):
            pillarbox.add(session, Message("good", b""), Message("\0", b""))
        session.add(Order(id=7))
        pillarbox.add(session, Message("after", b""))

    assert topics(database_url) == ["before", "after"]
    assert execute(database_url, "SELECT id FROM shop_order") == [(7,)]


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
