"""Messages added by the user's own flush events, and sessions with several binds."""

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import pillarbox
from outbox.postgres.connection import sqlalchemy_url
from outbox.schema import message_table
from outbox.writer import AddedMessages
from pillarbox import Message
from tests.fixtures.sessions import execute


class Base(DeclarativeBase):
    pass


class Invoice(Base):
    __tablename__ = "invoice"

    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = create_engine(sqlalchemy_url(database_url))
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def topics(url: str) -> list[str]:
    rows = execute(url, "SELECT topic FROM outbox.message ORDER BY seq")
    return [topic for (topic,) in rows]


def add_for_each_invoice(session: Session, *_: Any) -> None:
    for invoice in session.new:
        if isinstance(invoice, Invoice):
            pillarbox.add(session, Message(f"invoice.{invoice.id}", b""))


@pytest.mark.parametrize("moment", ["before_flush", "after_flush"])
def test_a_flush_listener_can_add_messages(
    database_url: str, engine: Engine, moment: str
) -> None:
    with Session(engine) as session, session.begin():
        event.listen(session, moment, add_for_each_invoice)
        session.add_all([Invoice(id=1), Invoice(id=2)])
        pillarbox.add(session, Message("by hand", b""))

    first, *rest = topics(database_url)
    assert (first, sorted(rest)) == ("by hand", ["invoice.1", "invoice.2"])
    assert execute(database_url, "SELECT count(*) FROM invoice") == [(2,)]


def test_a_listener_that_runs_first_does_not_miss_messages(
    database_url: str, engine: Engine
) -> None:
    event.listen(Session, "before_flush", add_for_each_invoice, insert=True)
    try:
        with Session(engine) as session, session.begin():
            pillarbox.add(session, Message("earlier", b""))
            session.add(Invoice(id=1))
    finally:
        event.remove(Session, "before_flush", add_for_each_invoice)

    assert topics(database_url) == ["earlier", "invoice.1"]


def test_a_commit_listener_can_add_messages(database_url: str, engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        event.listen(
            session,
            "before_commit",
            lambda session: pillarbox.add(session, Message("at last", b"")),
        )

    assert topics(database_url) == ["at last"]


@pytest.mark.parametrize("bound", [AddedMessages, message_table])
def test_a_session_with_several_binds_needs_a_bind_for_the_message_table(
    database_url: str, engine: Engine, bound: Any
) -> None:
    elsewhere = create_engine("sqlite://")
    Base.metadata.create_all(elsewhere)
    with Session(binds={Invoice: elsewhere, bound: engine}) as session:
        session.add(Invoice(id=1))
        pillarbox.add(session, Message("t", b""))
        session.commit()
        assert session.scalar(
            text("SELECT count(*) FROM invoice"), bind_arguments={"mapper": Invoice}
        )
    elsewhere.dispose()

    assert topics(database_url) == ["t"]
    assert execute(database_url, "SELECT count(*) FROM invoice") == [(0,)]
