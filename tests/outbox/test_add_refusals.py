"""`add` refuses invalid arguments, and a refusal leaves nothing behind."""

from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import pillarbox
from pillarbox import InvalidMessageError, Message
from pillarbox.outbox.errors import NotASessionError
from pillarbox.outbox.limits import Limits
from pillarbox.outbox.session import AnySession

GOOD = Message("orders.placed", {"order": 1})
BAD = Message("", b"")


def sessions() -> list[AnySession]:
    return [
        Session(),
        scoped_session(sessionmaker()),
        AsyncSession(),
        async_scoped_session(async_sessionmaker(), scopefunc=lambda: 1),
    ]


@pytest.mark.parametrize("session", sessions(), ids=lambda s: type(s).__name__)
def test_one_bad_message_prevents_its_whole_call(session: AnySession) -> None:
    with pytest.raises(InvalidMessageError, match="message topic '': is empty"):
        pillarbox.add(session, GOOD, BAD, GOOD)

    assert list(session.new) == []
    pillarbox.add(session, GOOD)
    pillarbox.add(session)
    (waiting,) = session.new
    with pytest.raises(InvalidMessageError):
        pillarbox.add(session, GOOD, BAD)
    assert list(session.new) == [waiting], "messages added earlier are kept"


def test_an_argument_that_is_not_a_session_is_refused_with_a_remedy() -> None:
    engine = create_engine("postgresql+psycopg://unused")
    things: list[Any] = [
        *(None, "session", object(), engine, Session),
        *(sessionmaker(), async_sessionmaker(), GOOD),
    ]
    for thing in things:
        with pytest.raises(NotASessionError, match=r"with sessions\.begin\(\) as"):
            pillarbox.add(thing, GOOD)


def test_an_argument_that_is_not_a_message_is_refused_with_a_remedy() -> None:
    session = Session()
    things: list[Any] = [[GOOD], iter([GOOD]), None, {"topic": "t"}, b"", Message]
    for thing in things:
        with pytest.raises(InvalidMessageError, match=r"add\(session, \*messages\)"):
            pillarbox.add(session, GOOD, thing)

    assert list(session.new) == []


def test_the_limits_of_the_call_apply() -> None:
    session = Session()
    small = Limits(max_payload_bytes=3)

    with pytest.raises(InvalidMessageError, match="over the limit of 3 bytes"):
        pillarbox.add(session, Message("t", b"four"), limits=small)
    with pytest.raises(InvalidMessageError, match="over the limit of 3 bytes"):
        pillarbox.insert_statement(Message("t", b"four"), limits=small)


def test_a_statement_without_messages_is_refused() -> None:
    with pytest.raises(InvalidMessageError, match=r"messages \(\): is empty; pass at"):
        pillarbox.insert_statement()


def test_the_statement_text_does_not_depend_on_the_number_of_messages() -> None:
    assert str(pillarbox.insert_statement(GOOD)) == str(
        pillarbox.insert_statement(GOOD, GOOD, GOOD)
    )
