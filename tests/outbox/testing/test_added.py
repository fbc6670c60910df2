"""`pillarbox.outbox.testing.added` returns the messages added to a session."""

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import pillarbox
from pillarbox import Message
from pillarbox.outbox.errors import NotASessionError
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.testing import added

A, B, C = (Message(topic, b"") for topic in "abc")


@pytest.fixture
def session(database_url: str) -> Iterator[Session]:
    engine: Engine = create_engine(sqlalchemy_url(database_url))
    with Session(engine) as session:
        yield session
    engine.dispose()


def test_pending_and_flushed_messages_are_returned_in_order_or_by_topic(
    session: Session,
) -> None:
    assert added(session) == []
    pillarbox.add(session, A)
    assert added(session) == [A]
    session.flush()
    pillarbox.add(session, B, C, A)

    assert added(session) == [A, B, C, A]
    assert added(session, "a") == [A, A]
    assert added(session, "b") == [B]
    assert added(session, "d") == []
    with pytest.raises(NotASessionError):
        added(object())  # type: ignore[call-overload]


@pytest.mark.parametrize("end", ["rollback", "close", "reset"])
def test_rolled_back_messages_are_not_returned(session: Session, end: str) -> None:
    for is_flushed in (False, True):
        pillarbox.add(session, A)
        if is_flushed:
            session.flush()

        getattr(session, end)()

        assert (is_flushed, added(session)) == (is_flushed, [])


def test_a_rolled_back_savepoint_removes_its_messages(session: Session) -> None:
    pillarbox.add(session, A)
    with session.begin_nested():
        pillarbox.add(session, B)
    lost = session.begin_nested()
    pillarbox.add(session, Message("lost", b""))
    session.flush()
    with session.begin_nested():
        pillarbox.add(session, Message("lost inside", b""))
    pillarbox.add(session, Message("pending", b""))
    lost.rollback()
    pillarbox.add(session, C)

    assert added(session) == [A, B, C]
    session.commit()
    assert added(session) == [A, B, C]


async def test_messages_of_a_committed_async_session_are_returned(
    database_url: str,
) -> None:
    engine = create_async_engine(sqlalchemy_url(database_url))
    async with AsyncSession(engine) as session:
        async with session.begin_nested():
            pillarbox.add(session, A)
        assert added(session) == [A], "without awaiting anything"
        await session.commit()
        pillarbox.add(session, B)
        await session.rollback()

        assert added(session) == [A]
    await engine.dispose()


def test_messages_added_by_a_listener_during_the_flush_are_returned(
    session: Session,
) -> None:
    def announce(session: Session, *_: Any) -> None:
        pillarbox.add(session, B)

    event.listen(session, "before_flush", announce)
    # A role that can't read the table.
    session.connection().exec_driver_sql("SET LOCAL ROLE pillarbox_application")
    pillarbox.add(session, A)
    session.flush()

    assert added(session) == [A, B]
