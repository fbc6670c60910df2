"""Messages are rows of the unit of work, like those of the application."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, inspect
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.ext.horizontal_shard import ShardedSession
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Mapper,
    Session,
    mapped_column,
    object_session,
)

import pillarbox
import pillarbox.outbox.schema
from pillarbox import ConfigError, Message
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.writer import AddedMessages
from tests.fixtures.added import topics
from tests.fixtures.sessions import execute


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "watched_order"

    id: Mapped[int] = mapped_column(primary_key=True)


announced: list[Session] = []


def announce_note() -> str:
    for session in announced:
        pillarbox.add(session, Message("a note", b""))
    return "noted"


class Note(Base):
    __tablename__ = "watched_note"

    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str] = mapped_column(default=announce_note)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = create_engine(sqlalchemy_url(database_url))
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


class Manager:
    """A transaction manager that commits only what it has seen written.

    It closes the session otherwise, as zope.sqlalchemy does.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.is_joined = self.is_changed = False
        event.listen(session, "after_attach", self._join)
        event.listen(session, "after_flush", self._change)

    def _join(self, *_: Any) -> None:
        self.is_joined = True

    def _change(self, *_: Any) -> None:
        self.is_changed = True

    def commit(self) -> None:
        if self.is_joined:
            self._session.flush()
        if self.is_changed:
            self._session.commit()
        self._session.close()


def add_and_flush(session: Session) -> None:
    pillarbox.add(session, Message("t", b""))
    session.flush()


def add_in_savepoint(session: Session) -> None:
    with session.begin_nested():
        pillarbox.add(session, Message("t", b""))


def add_beside_a_lost_savepoint(session: Session) -> None:
    pillarbox.add(session, Message("t", b""))
    lost = session.begin_nested()
    pillarbox.add(session, Message("lost", b""))
    lost.rollback()


def test_a_transaction_of_messages_alone_is_seen_as_a_write(
    database_url: str, engine: Engine
) -> None:
    works: list[Callable[[Session], None]] = [
        lambda session: pillarbox.add(session, Message("t", b"")),
        add_and_flush,
        add_in_savepoint,
        add_beside_a_lost_savepoint,
    ]
    for number, work in enumerate(works, start=1):
        session = Session(engine)
        manager = Manager(session)

        work(session)
        manager.commit()

        assert topics(database_url) == ["t"] * number


@pytest.mark.parametrize("moment", ["before_flush", "after_flush"])
def test_a_listener_of_every_flush_sees_mapped_rows(
    database_url: str, engine: Engine, moment: str
) -> None:
    seen: list[str] = []

    def audit(session: Session, *_: Any) -> None:
        for new in session.new:
            mapper: Mapper[Any] = inspect(type(new))
            assert object_session(new) is session
            seen.append(f"{new.__tablename__} {mapper.primary_key_from_instance(new)}")

    order, message = Order(id=7), Message("t", {"a": 1})
    event.listen(Session, moment, audit, insert=True)
    try:
        with Session(engine) as session, session.begin():
            session.add(order)
            pillarbox.add(session, message)
            pillarbox.add(session, Message("u", b""))
    finally:
        event.remove(Session, moment, audit)

    assert sorted(seen) == [f"message {(message.id,)}", "watched_order (7,)"]
    assert topics(database_url) == ["t", "u"]


def add_for_each_order(session: Session, *_: Any) -> None:
    for order in session.new:
        if isinstance(order, Order):
            pillarbox.add(session, Message(f"order {order.id}", b""))


@pytest.mark.parametrize("moment", ["before_flush", "after_flush"])
def test_a_listener_of_a_flush_or_a_commit_can_add_messages(
    database_url: str, engine: Engine, moment: str
) -> None:
    def add_at_last(session: Session) -> None:
        pillarbox.add(session, Message("at last", b""))

    with Session(engine) as session, session.begin():
        # As if it were registered before this package was imported.
        event.listen(session, moment, add_for_each_order, insert=True)
        event.listen(session, "before_commit", add_at_last)
        session.add_all([Order(id=1), Order(id=2)])
        pillarbox.add(session, Message("by hand", b""))
        session.flush()

    first, *middle, last = topics(database_url)
    assert (first, last) == ("by hand", "at last")
    assert sorted(middle) == ["order 1", "order 2"]


@pytest.mark.parametrize("moment", ["before_insert", "after_insert"])
def test_a_mapper_event_adds_its_messages_after_those_that_wait(
    database_url: str, engine: Engine, moment: str
) -> None:
    def announce(_mapper: Any, _connection: Any, order: Order) -> None:
        session = object_session(order)
        assert session is not None
        pillarbox.add(session, Message(f"order {order.id}", b""))

    event.listen(Order, moment, announce)
    try:
        with Session(engine) as session, session.begin():
            session.add_all([Order(id=1), Order(id=2)])
            pillarbox.add(session, Message("by hand", b""))
            session.flush()
            lost = session.begin_nested()
            session.add(Order(id=3))
            session.flush()
            lost.rollback()
            pillarbox.add(session, Message("last", b""))
    finally:
        event.remove(Order, moment, announce)

    assert topics(database_url) == ["by hand", "order 1", "order 2", "last"]


def test_a_message_that_a_savepoints_own_flush_adds_is_not_in_the_savepoint(
    database_url: str, engine: Engine
) -> None:
    with Session(engine) as session, session.begin():
        session.add(Order(id=1))

        def announce(session: Session, *_: Any) -> None:
            if session.new:
                pillarbox.add(session, Message("of the flush", b""))

        event.listen(session, "after_flush", announce)
        savepoint = session.begin_nested()
        savepoint.rollback()

    assert topics(database_url) == ["of the flush"]


def test_a_default_of_a_bulk_insert_can_add_a_message(
    database_url: str, engine: Engine
) -> None:
    with Session(engine) as session, session.begin():
        announced.append(session)
        session.bulk_save_objects([Note(id=1)])
        session.flush()
        announced.clear()

    assert topics(database_url) == ["a note"]


def test_a_session_reads_no_message_back(engine: Engine) -> None:
    with Session(engine) as session:
        session.connection().exec_driver_sql("SET LOCAL ROLE pillarbox_application")
        pillarbox.add(session, Message("one", b""))
        session.flush()
        pillarbox.add(session, Message("two", b""), Message("three", b""))
        session.commit()


@pytest.mark.parametrize(
    "bound", [AddedMessages, pillarbox.outbox.schema.message_table]
)
def test_a_session_with_several_binds_needs_a_bind_for_the_message_table(
    database_url: str, engine: Engine, bound: Any
) -> None:
    elsewhere = create_engine("sqlite://")
    Base.metadata.create_all(elsewhere)
    with Session(binds={Base: elsewhere}) as session:
        session.add(Order(id=1))
        pillarbox.add(session, Message("t", b""))
        with pytest.raises(ConfigError, match=r"outbox\.schema\.message_table: engine"):
            session.flush()
    with Session(binds={Base: elsewhere, bound: engine}) as session:
        session.add(Order(id=1))
        pillarbox.add(session, Message("t", b""))
        session.commit()
        assert session.get(Order, 1)
    elsewhere.dispose()

    assert topics(database_url) == ["t"]
    assert execute(database_url, "SELECT count(*) FROM watched_order") == [(0,)]


@pytest.mark.parametrize("drop", [Session.rollback, Session.expunge_all])
def test_a_missing_bind_matters_only_while_messages_wait(
    engine: Engine, drop: Callable[[Session], None]
) -> None:
    with Session(binds={Base: engine}) as session:
        pillarbox.add(session, Message("t", b""))
        drop(session)
        session.add(Order(id=1))
        session.commit()


def test_the_table_takes_rows_of_other_statements(
    database_url: str, engine: Engine
) -> None:
    row = {"id": pillarbox.uuid7(), "lane": 0, "topic": "t", "content_type": "a/b"}
    with engine.begin() as connection:
        statement = pillarbox.outbox.schema.message_table.insert()
        connection.execute(statement, row | {"payload": b""})

    assert topics(database_url) == ["t"]


async def test_a_session_of_several_databases_needs_to_know_the_shard_of_a_message(
    database_url: str, engine: Engine
) -> None:
    options: dict[str, Any] = {
        "shards": {"eu": engine},
        "shard_chooser": lambda mapper, instance, clause=None: instance.country,
        "identity_chooser": lambda *_, **__: ["eu"],
        "execute_chooser": lambda _: ["eu"],
    }
    with ShardedSession(**options) as session:
        with pytest.raises(ConfigError, match=r"bind_arguments=\{'shard_id': …\}"):
            pillarbox.add(session, Message("t", b""))
        session.execute(
            pillarbox.insert_statement(Message("t", b"")),
            bind_arguments={"shard_id": "eu"},
        )
        session.commit()
    assert topics(database_url) == ["t"]

    asynchronous = AsyncSession(sync_session_class=ShardedSession, **options)
    with pytest.raises(ConfigError, match="is a ShardedSession"):
        pillarbox.add(asynchronous, Message("t", b""))
