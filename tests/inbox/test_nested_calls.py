"""What a handler calls under its own consumer name takes part in the handling."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker

from inbox import Consumer, ForeignId, guard, idempotent, record_receipt
from inbox.events import DuplicateSkipped, MessageHandled
from inbox.sources.memory import MemorySource
from outbox import Message
from tests.fixtures.consumers import async_sessions_of, running, sessions_of
from tests.fixtures.sessions import execute


@pytest.fixture
def url(database_url: str) -> str:
    execute(database_url, "CREATE TABLE effect (what text)")
    return database_url


@pytest.fixture
def sessions(url: str) -> Iterator[sessionmaker[Session]]:
    with sessions_of(url) as made:
        yield made


def effects(url: str) -> list[str]:
    return [what for (what,) in execute(url, "SELECT what FROM effect ORDER BY what")]


def insert(session: Session, what: str) -> None:
    session.execute(text("INSERT INTO effect VALUES (:what)"), {"what": what})


def by_order(message: Message) -> ForeignId:
    return ForeignId("orders", message.payload.decode())


@idempotent(consumer="shop")
def bill(session: Session, message: Message) -> None:
    insert(session, "bill")


@idempotent(consumer="shop")
def mail(session: Session, message: Message) -> None:
    insert(session, "mail")


@idempotent(consumer="shop")
def handle(session: Session, message: Message) -> None:
    bill(session, message)
    mail(session, message)
    bill(session, message)


@idempotent(consumer="shop", key=by_order)
def bill_order(session: Session, message: Message) -> None:
    insert(session, "bill")


@idempotent(consumer="shop", key=by_order)
def handle_order(session: Session, message: Message) -> None:
    bill_order(session, message)
    bill_order(session, message)


@idempotent(consumer="shop")
async def bill_async(session: AsyncSession, message: Message) -> None:
    await session.run_sync(insert, "bill")


@idempotent(consumer="shop")
async def handle_async(session: AsyncSession, message: Message) -> None:
    await bill_async(session, message)
    await bill_async(session, message)


def test_an_idempotent_function_can_call_others_of_its_consumer_once_each(
    url: str, sessions: sessionmaker[Session]
) -> None:
    message = Message("orders", b"")
    for _ in range(2):
        with sessions.begin() as session:
            handle(session, message)
            handle(session, message)
            bill(session, message)
    assert effects(url) == ["bill", "mail"]


def test_the_same_is_true_of_foreign_ids(
    url: str, sessions: sessionmaker[Session]
) -> None:
    message = Message("orders", b"order 1")
    for _ in range(2):
        with sessions.begin() as session:
            handle_order(session, message)
            handle_order(session, message)
    assert effects(url) == ["bill"]


async def test_the_same_is_true_of_async_functions(url: str) -> None:
    message = Message("orders", b"")
    async with async_sessions_of(url, "asyncpg") as sessions:
        for _ in range(2):
            async with sessions.begin() as session:
                await handle_async(session, message)
                await bill_async(session, message)
    assert effects(url) == ["bill"]


def test_a_guards_block_can_call_idempotent_functions_of_its_consumer(
    url: str, sessions: sessionmaker[Session]
) -> None:
    message = Message("orders", b"")
    for _ in range(2):
        with (
            sessions.begin() as session,
            guard(session, message.id, consumer="shop") as is_new,
        ):
            if is_new:
                bill(session, message)
                mail(session, message)
                bill(session, message)
    assert effects(url) == ["bill", "mail"]


async def test_an_async_guards_block_can_call_an_idempotent_function_of_its_consumer(
    url: str,
) -> None:
    message = Message("orders", b"")
    async with async_sessions_of(url) as sessions:
        for _ in range(2):
            async with (
                sessions.begin() as session,
                guard(session, message.id, consumer="shop") as is_new,
            ):
                if is_new:
                    await bill_async(session, message)
    assert effects(url) == ["bill"]


def test_a_message_that_comes_twice_in_one_transaction_is_handled_once(
    url: str, sessions: sessionmaker[Session]
) -> None:
    message = Message("orders", b"")
    seen: list[bool] = []
    with sessions.begin() as session:
        for _ in range(2):
            with guard(session, message.id, consumer="shop") as is_new:
                seen.append(is_new)
                with guard(session, message.id, consumer="shop") as is_new_inside:
                    seen.append(is_new_inside)
                if is_new:
                    assert not record_receipt(session, message.id, "shop")
        bill(session, message)
    assert seen == [True, False, False, False]
    assert effects(url) == []


def test_a_function_can_run_again_after_a_rollback_to_a_savepoint(
    url: str, sessions: sessionmaker[Session]
) -> None:
    message = Message("orders", b"")
    with sessions.begin() as session, guard(session, message.id, consumer="shop"):
        with suppress(ArithmeticError), session.begin_nested():
            with session.begin_nested():
                bill(session, message)
            raise ArithmeticError
        assert session.scalar(text("SELECT count(*) FROM effect")) == 0
        with session.begin_nested():
            bill(session, message)
        bill(session, message)
    assert effects(url) == ["bill"]


@pytest.mark.parametrize("terms", [{}, {"batch": 2}], ids=str)
async def test_a_consumers_handler_can_call_several_functions_of_its_consumer(
    terms: dict[str, Any], url: str, sessions: sessionmaker[Session]
) -> None:
    messages = [Message("orders", b"1"), Message("orders", b"2")]

    def handle(session: Session, messages: Any) -> None:
        for message in messages if isinstance(messages, list) else [messages]:
            for function in (bill, mail, bill):
                function(session, message)

    consumer = Consumer(MemorySource(*messages, *messages), sessions, name="shop")
    consumer.handles("*", **terms)(handle)
    async with running(consumer) as events:
        await events.wait_for(MessageHandled, 2)
        await events.wait_for(DuplicateSkipped, 2)
    assert effects(url) == ["bill", "bill", "mail", "mail"]
