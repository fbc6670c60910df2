"""A session that is closed without a commit, a rollback or an error is reported."""

import gc
import logging
import sys
import warnings
from collections.abc import (
    Callable,
    Iterator,
    MutableMapping,
)
from contextlib import closing
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy import Engine, create_engine, event, select, text
from sqlalchemy.exc import IntegrityError, InternalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import pillarbox
from pillarbox import Message
from pillarbox.outbox import unsent
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.testing import added
from pillarbox.outbox.unsent import MessagesUnsent, UnsentMessagesWarning
from pillarbox.outbox.writer import AddedMessages

ORDER = Message("orders.placed", {"order": 1})
REFUND = Message("refunds.made", {"order": 1})
CLOSED = MessagesUnsent(
    messages=3,
    topics=("orders.placed", "refunds.made"),
)
ONE = MessagesUnsent(messages=1, topics=("orders.placed",))


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[MessagesUnsent]:
    reported: list[MessagesUnsent] = []
    monkeypatch.setattr(unsent, "_report", reported.append)
    return reported


def test_a_session_that_is_closed_without_a_commit_is_reported_each_time(
    reported: list[MessagesUnsent],
) -> None:
    with Session() as session:
        pillarbox.add(session, ORDER, REFUND)
        pillarbox.add(session, ORDER)
    assert reported == [CLOSED]

    pillarbox.add(session, ORDER)
    session.close()
    assert reported == [CLOSED, ONE]

    scoped = scoped_session(sessionmaker())
    pillarbox.add(scoped, ORDER)
    scoped.remove()
    assert reported == [CLOSED, ONE, ONE]

    pillarbox.add(Session(), ORDER)
    gc.collect()
    assert reported == [CLOSED, ONE, ONE], "of a session that is only collected"


async def test_an_async_session_that_is_closed_without_a_commit_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whether an exception closes it can't be seen, so nothing is raised or warned."""
    with caplog.at_level(logging.WARNING, "pillarbox"):
        async with AsyncSession() as session:
            pillarbox.add(session, ORDER)

    (record,) = caplog.records
    assert "forgotten or prevented by an exception" in record.getMessage()


async def leave_async_transaction(engine: AsyncEngine | None) -> None:
    async with AsyncSession(engine) as session, session.begin():
        pillarbox.add(session, ORDER)
        if engine is not None:
            await session.flush()
        raise ZeroDivisionError


async def test_an_exception_in_an_async_transaction_is_not_reported(
    database_url: str, reported: list[MessagesUnsent]
) -> None:
    engine = create_async_engine(sqlalchemy_url(database_url))
    for bind in (None, engine):
        with pytest.raises(ZeroDivisionError):
            await leave_async_transaction(bind)
    await engine.dispose()

    assert reported == []


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = create_engine(sqlalchemy_url(database_url))
    yield engine
    engine.dispose()


def test_a_flush_hides_no_loss(engine: Engine, reported: list[MessagesUnsent]) -> None:
    sendings: list[Callable[[Session], Any]] = [
        Session.flush,
        lambda session: session.scalars(select(AddedMessages)).all(),
        Session.begin_nested,
    ]
    for send in sendings:
        with Session(engine) as session:
            pillarbox.add(session, ORDER)
            send(session)
    assert reported == [ONE, ONE, ONE]

    reported.clear()
    with Session(engine) as session:
        pillarbox.add(session, ORDER)
        outer = session.begin_nested()
        with session.begin_nested():
            pillarbox.add(session, REFUND)
        outer.rollback()
        with session.begin_nested():
            pillarbox.add(session, ORDER)
    two = MessagesUnsent(messages=2, topics=("orders.placed",))
    assert reported == [two], "those that no savepoint rolled back"


def test_a_session_that_committed_or_failed_to_is_not_reported(
    engine: Engine, reported: list[MessagesUnsent]
) -> None:
    with Session(engine) as session:
        pillarbox.add(session, ORDER)
        session.commit()
    with Session(engine) as session:
        session.execute(text("SET TRANSACTION READ ONLY"))
        pillarbox.add(session, ORDER)
        with pytest.raises(InternalError):
            session.commit()
    with Session(engine) as session:
        session.execute(
            text("CREATE TEMP TABLE once (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        )
        pillarbox.add(session, ORDER)
        session.execute(text("INSERT INTO once VALUES (1), (1)"))
        with pytest.raises(IntegrityError):
            session.commit()
    assert reported == []

    with Session(engine) as session:
        pillarbox.add(session, REFUND)
        session.flush()
        pillarbox.add(session, ORDER)
        session.expunge_all()
        session.commit()
    assert reported == [ONE], "the message that the commit leaves out"


def test_a_rollback_or_a_look_of_a_test_is_no_loss(
    reported: list[MessagesUnsent],
) -> None:
    with Session() as session:
        pillarbox.add(session, ORDER)
        session.rollback()
    with sessionmaker().begin() as session:
        pillarbox.add(session, ORDER)
        session.rollback()
    with Session() as session:
        pillarbox.add(session, ORDER)
        assert added(session) == [ORDER]
    gc.collect()

    assert reported == []


def close_in_finally(session: Session) -> None:
    try:
        add_and_fail(session)
    finally:
        session.close()


def leave_block(session: Session) -> None:
    with session:
        add_and_fail(session)


def leave_transaction(session: Session) -> None:
    with session, session.begin():
        add_and_fail(session)


def add_and_fail(session: Session) -> None:
    pillarbox.add(session, ORDER)
    raise ZeroDivisionError


def leave_generator(session: Session) -> None:
    def sessions() -> Iterator[Session]:
        with session:
            yield session

    generator: Any = sessions()
    with closing(generator):
        add_and_fail(next(generator))


@pytest.mark.parametrize(
    "leave", [close_in_finally, leave_block, leave_transaction, leave_generator]
)
def test_an_exception_is_not_reported_as_a_loss(
    leave: Callable[[Session], None], reported: list[MessagesUnsent]
) -> None:
    with pytest.raises(ZeroDivisionError):
        leave(Session())

    assert reported == []


@pytest.mark.parametrize("failure", [HTTPException(409), None])
async def test_a_request_that_fails_is_not_reported(
    failure: HTTPException | None, reported: list[MessagesUnsent]
) -> None:
    app = FastAPI()

    def session_of_request() -> Iterator[Session]:
        with Session() as session:
            yield session

    @app.post("/")
    async def place(session: Annotated[Session, Depends(session_of_request)]) -> None:
        pillarbox.add(session, ORDER)
        if failure is not None:
            raise failure

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(part: MutableMapping[str, Any]) -> None:
        sent.append(part)

    sent: list[MutableMapping[str, Any]] = []
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    await app(scope | {"query_string": b""}, receive, send)

    assert sent[0]["status"] == (409 if failure else 200)
    assert reported == ([] if failure else [ONE])


def test_a_loss_is_logged_and_warned_about_with_topic_and_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.WARNING, "pillarbox"),
        pytest.warns(UnsentMessagesWarning, match="of topic 'orders.placed': their"),
        Session() as session,
    ):
        pillarbox.add(session, ORDER)

    (record,) = caplog.records
    assert (record.name, record.levelname) == ("pillarbox", "WARNING")
    assert record.getMessage() == (
        "MessagesUnsent messages=1 topics=('orders.placed',) cause='session was closed "
        "without a commit, or expunged before a flush' remedy='commit the session that "
        "add was given (with sessions.begin() as session: …), or roll it back on "
        "purpose'"
    )
    assert record.__dict__["event"] == "MessagesUnsent"
    assert record.__dict__["values"]["topics"] == ("orders.placed",)


def test_a_session_closes_even_if_warnings_are_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)

    with warnings.catch_warnings(), Session() as session:
        warnings.simplefilter("error")
        pillarbox.add(session, ORDER)
        session.close()

    assert not session.in_transaction()
    assert [one.exc_type for one in raised] == [UnsentMessagesWarning]


LISTENERS = [
    pytest.param(name, end, id=f"{name} after {end.__name__}")
    for name, end in (
        ("after_commit", Session.commit),
        ("after_rollback", Session.rollback),
    )
]


@pytest.mark.parametrize(("name", "end"), LISTENERS)
def test_a_message_added_after_its_transaction_has_ended_is_refused(
    name: str, end: Any, engine: Engine, reported: list[MessagesUnsent]
) -> None:
    session = Session(engine)
    event.listen(session, name, lambda it: pillarbox.add(it, ORDER))
    with closing(session):
        session.execute(text("SELECT 1"))
        with pytest.raises(ConfigError, match="use before_commit, or another"):
            end(session)
    assert reported == []


async def test_a_message_added_after_an_async_commit_is_refused(
    database_url: str,
) -> None:
    engine = create_async_engine(sqlalchemy_url(database_url))
    async with AsyncSession(engine) as session:
        event.listen(
            session.sync_session, "after_commit", lambda it: pillarbox.add(it, ORDER)
        )
        await session.execute(text("SELECT 1"))
        with pytest.raises(ConfigError, match="use before_commit, or another"):
            await session.commit()
    await engine.dispose()


def test_listeners_before_the_commit_and_after_a_savepoint_can_add_messages(
    engine: Engine, reported: list[MessagesUnsent]
) -> None:
    session = Session(engine)
    seen: list[str] = []

    def add_once(name: str) -> Callable[[Session], None]:
        def add(session: Session) -> None:
            if name not in seen and (name, session.in_nested_transaction()) in WHEN:
                seen.append(name)
                pillarbox.add(session, ORDER)

        return add

    for name, _ in WHEN:
        event.listen(session, name, add_once(name))
    with closing(session):
        with session.begin_nested():
            session.execute(text("SELECT 1"))
        session.commit()
        assert seen == ["after_commit", "before_commit"]
        rows = session.scalars(select(AddedMessages)).all()
    assert len(rows) == 2
    assert reported == []


WHEN = {("after_commit", True), ("before_commit", False)}
