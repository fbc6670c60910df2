"""The texts of database errors that our processes write contain no value of a row."""

import json
import traceback
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import asyncpg
import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from typing_extensions import override

from pillarbox import Consumer, Message
from pillarbox.inbox.events import HandlerFailed, MessageDeadLettered
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.errors import message_of, one_line, shorten, traceback_of
from tests.fixtures.consumers import (
    QUICK,
    async_sessions_of,
    running,
    sessions_by,
    sessions_of,
)
from tests.fixtures.sessions import execute

SECRET = "jane@example.org"
TAKEN = f"INSERT INTO person (email, age) VALUES ('{SECRET}', 1)"
NO_NUMBER = f"SELECT '{SECRET}'::integer"
SAID = {
    TAKEN: 'duplicate key value violates unique constraint "person_pkey"'
    " (SQLSTATE 23505, constraint person_pkey)",
    NO_NUMBER: 'invalid input syntax for type integer: "…" (SQLSTATE 22P02)',
}
"""What is said of the error of each statement."""


class Base(DeclarativeBase):
    pass


class Person(Base):
    __tablename__ = "person"

    email: Mapped[str] = mapped_column(primary_key=True)
    age: Mapped[int]


@pytest.fixture
def people(database_url: str) -> str:
    """A database that already contains Jane."""
    execute(database_url, "CREATE TABLE person (email text PRIMARY KEY, age integer)")
    execute(database_url, TAKEN)
    return database_url


Way: TypeAlias = Callable[[str, str], Awaitable[None]]


async def by_psycopg(url: str, statement: str) -> None:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await connection.execute(statement)


async def by_asyncpg(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


async def by_session(url: str, statement: str) -> None:
    with sessions_of(url) as sessions, sessions() as session:
        session.execute(text(statement))


async def by_session_of_psycopg(url: str, statement: str) -> None:
    async with async_sessions_of(url) as sessions, sessions() as session:
        await session.execute(text(statement))


async def by_session_of_asyncpg(url: str, statement: str) -> None:
    async with async_sessions_of(url, "asyncpg") as sessions, sessions() as session:
        await session.execute(text(statement))


WAYS: list[Way] = [
    by_psycopg,
    by_asyncpg,
    by_session,
    by_session_of_psycopg,
    by_session_of_asyncpg,
]


async def caught(doing: Awaitable[None]) -> Exception:
    with pytest.raises(Exception) as it:
        await doing
    assert SECRET in "".join(traceback.format_exception(it.value))
    return it.value


async def bound_by_asyncpg(url: str, statement: str, value: object) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement.replace(":value", "$1"), value)
    finally:
        await connection.close()


async def bound_by_session(url: str, statement: str, value: object) -> None:
    async with async_sessions_of(url, "asyncpg") as sessions, sessions() as session:
        await session.execute(text(statement), {"value": value})


async def bound_to_many_by_asyncpg(url: str, statement: str, value: object) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.executemany(
            statement.replace(":value", "$1"), [(None,), (value,)]
        )
    finally:
        await connection.close()


@pytest.mark.parametrize(
    "way", [bound_by_asyncpg, bound_by_session, bound_to_many_by_asyncpg]
)
async def test_an_argument_that_cannot_be_encoded_is_not_quoted(
    people: str, way: Callable[[str, str, object], Awaitable[None]]
) -> None:
    for type_, value in (
        ("integer", SECRET),
        ("integer[]", [1, SECRET]),
        ("text", SECRET.encode()),
        ("uuid", SECRET),
        ("uuid[]", [SECRET]),
    ):
        statement = f"SELECT CAST(:value AS {type_})"

        error = await caught(way(people, statement, value))

        assert "invalid input for query argument $1" in message_of(error), type_
        assert message_of(error).endswith(" (SQLSTATE 22000)"), type_
        assert SECRET not in message_of(error), type_
        assert SECRET not in traceback_of(error), type_


class AppError(Exception):
    pass


Wrapping: TypeAlias = Callable[[Exception], Exception]
WRAPPINGS: dict[str, Wrapping] = {
    "as an argument": lambda error: AppError("can't save", error),
    "as text in an argument": lambda error: AppError("can't save", str(error)),
    "as text after quotes": lambda error: AppError("can't save", f'"it\'s" {error}'),
    "in a text": lambda error: AppError(f"can't save: {error}"),
    "as repr in a text": lambda error: AppError(f"can't save: {error!r}"),
    "as repr in an argument": lambda error: AppError("can't save", repr(error)),
    "as a key": lambda error: KeyError(str(error)),
    "as repr": lambda error: RuntimeError(repr(error)),
    "in a dict": lambda error: RuntimeError({"error": str(error)}),
    "as JSON": lambda error: RuntimeError(json.dumps({"error": str(error)})),
    "as JSON in an argument": lambda error: AppError(1, json.dumps([str(error)])),
    "in one line": lambda error: AppError(" ".join(str(error).split())),
    "in a group": lambda error: ExceptionGroup(f"can't save: {error!r}", [error]),
}


@pytest.mark.parametrize("statement", SAID, ids=["violation", "data exception"])
@pytest.mark.parametrize("way", WAYS)
async def test_an_error_says_what_is_wrong_but_no_value_however_it_is_wrapped(
    people: str, way: Way, statement: str
) -> None:
    cause = await caught(way(people, statement))

    assert message_of(cause).endswith(SAID[statement])
    assert SECRET not in one_line(cause)
    for how, wrapping in WRAPPINGS.items():
        for is_hidden in (False, True):
            error = _wrap(cause, wrapping, is_hidden)
            for with_text in (False, True):
                said = one_line(error, with_text=with_text)
                assert SECRET not in said, how
                assert "person_pkey" in said or "for type integer" in said, how
                trace = traceback_of(error, with_text=with_text)
                assert SECRET not in trace, how
                assert "Traceback (most recent call last)" in trace, how
                if not is_hidden:
                    assert f"in {getattr(way, '__name__', '')}" in trace, how
                    assert "The above exception was the direct cause" in trace, how


def _wrap(cause: Exception, wrapping: Wrapping, is_hidden: bool) -> Exception:
    with pytest.raises(Exception) as it:  # noqa: PT012
        try:
            raise cause  # noqa: TRY301
        except Exception as error:  # noqa: BLE001
            raise wrapping(error) from None if is_hidden else error
    return it.value


async def test_the_text_of_a_cause_is_cut_when_the_context_is_another_error(
    people: str,
) -> None:
    async def wrapped() -> None:
        try:
            await by_psycopg(people, NO_NUMBER)
        except psycopg.Error as error:
            raise AppError("can't save", error) from ValueError("another")

    error = await caught(wrapped())

    for with_text in (False, True):
        assert SECRET not in one_line(error, with_text=with_text)
        assert SECRET not in traceback_of(error, with_text=with_text)


class UnsayableError(Exception):
    @override
    def __str__(self) -> str:
        raise ValueError("it has no text")

    @override
    def __repr__(self) -> str:
        raise ValueError("it has no text")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UnsayableError(), "UnsayableError: <exception str() failed>"),
        (AppError("failed", UnsayableError()), "AppError: <exception str() failed>"),
        (ExceptionGroup("two", [UnsayableError()]), "ExceptionGroup: two (1 sub-exce"),
    ],
)
def test_an_error_whose_text_fails_is_named_by_its_type(
    error: Exception, said: str
) -> None:
    assert one_line(error, with_text=True).startswith(said)
    assert "exception str() failed" in traceback_of(error, with_text=True)
    assert one_line(error) in (said.partition(":")[0], "ExceptionGroup: UnsayableError")
    assert shorten(UnsayableError()) == "<UnsayableError>"


@pytest.mark.parametrize("is_async", [True, False], ids=["coroutine", "plain"])
async def test_a_handlers_error_whose_text_fails_is_dead_lettered_at_last(
    database_url: str, is_async: bool
) -> None:
    async with sessions_by(
        database_url, "asyncpg" if is_async else "psycopg"
    ) as sessions:
        consumer = Consumer(
            MemorySource(Message("t", b""), Message("u", b"")),
            sessions,
            name="c",
            retry=QUICK,
        )

        async def handle(session: AsyncSession, message: Message) -> None:
            raise UnsayableError

        def handle_plainly(session: Session, message: Message) -> None:
            raise UnsayableError

        for topic, permanent in (("t", ()), ("u", UnsayableError)):
            consumer.handles(topic, permanent=permanent)(
                handle if is_async else handle_plainly
            )
        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered, 2)

    assert len(events.of(HandlerFailed)) == QUICK.max_attempts - 1
    letters = execute(
        database_url,
        "SELECT topic, attempts, error_reason, error_stacktrace"
        " FROM inbox.dead_letter ORDER BY topic",
    )
    assert [letter[:2] for letter in letters] == [("t", 3), ("u", 1)]
    for _, _, reason, trace in letters:
        assert "UnsayableError: raised in " in reason
        assert "UnsayableError: <exception str() failed>" in trace


async def test_a_session_that_needs_a_rollback_quotes_no_row(
    people: str,
) -> None:
    async def use_session_again() -> None:
        with sessions_of(people) as sessions, sessions() as session:
            session.add(Person(email=SECRET, age=1))
            try:
                session.flush()
            except Exception:  # noqa: BLE001
                session.execute(text("SELECT 1"))

    error = await caught(use_session_again())

    assert isinstance(error, PendingRollbackError)
    assert "previous exception" in one_line(error, with_text=True)
    assert "after IntegrityError: (psycopg.errors.UniqueViolation" in one_line(error)
    for with_text in (False, True):
        assert SECRET not in one_line(error, with_text=with_text)
        assert SECRET not in traceback_of(error, with_text=with_text)


def test_a_traceback_without_a_database_error_is_the_same_as_pythons() -> None:
    def fail() -> None:
        try:
            int("x")
        except ValueError as error:
            error.add_note("a note")
            raise KeyError("y")  # noqa: B904 - the context is to be shown

    with pytest.raises(KeyError) as it:
        fail()

    pythons = "".join(traceback.format_exception(it.value))
    assert traceback_of(it.value, with_text=True) == pythons
