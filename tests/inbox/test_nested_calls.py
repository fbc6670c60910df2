"""A handler can't record its own receipt again: what it calls needs another name."""

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker

from inbox.errors import InvalidReceiptError
from inbox.events import MessageDeadLettered
from inbox.receipt import ForeignId
from inbox.sources.memory import MemorySource
from pillarbox import Message, guard, idempotent, record_receipt
from tests.fixtures.consumers import async_sessions_of, consuming, sessions_of
from tests.fixtures.effects import EFFECT, effects

REMEDY = "a consumer name of its own"


@pytest.fixture
def sessions(url: str) -> Iterator[sessionmaker[Session]]:
    with sessions_of(url) as made:
        yield made


def insert(session: Session, what: str) -> None:
    session.execute(EFFECT, {"what": what})


def by_order(message: Message) -> ForeignId:
    return ForeignId("orders", message.payload.decode())


@idempotent(consumer="shop")
def bill(session: Session, message: Message) -> None:
    insert(session, "bill")


@idempotent(consumer="mail")
def mail(session: Session, message: Message) -> None:
    insert(session, "mail")


@idempotent(consumer="shop", key=by_order)
def bill_order(session: Session, message: Message) -> None:
    insert(session, "bill")


@idempotent(consumer="shop")
async def bill_async(session: AsyncSession, message: Message) -> None:
    await session.run_sync(insert, "bill")


@idempotent(consumer="shop")
def handle(session: Session, message: Message) -> None:
    mail(session, message)
    bill(session, message)


@idempotent(consumer="shop", key=by_order)
def handle_order(session: Session, message: Message) -> None:
    mail(session, message)
    bill_order(session, message)


@idempotent(consumer="shop")
async def handle_async(session: AsyncSession, message: Message) -> None:
    await session.run_sync(mail, message)
    await bill_async(session, message)


def handle_in_guard(session: Session, message: Message) -> None:
    with guard(session, message.id, consumer="shop"):
        mail(session, message)
        bill(session, message)


def guard_in_guard(session: Session, message: Message) -> None:
    with (
        guard(session, message.id, consumer="shop"),
        guard(session, message.id, consumer="shop"),
    ):
        mail(session, message)


@pytest.mark.parametrize(
    "call", [handle, handle_order, handle_in_guard, guard_in_guard]
)
def test_what_a_handler_calls_under_its_own_name_is_refused_with_the_remedy(
    url: str, sessions: sessionmaker[Session], call: Any
) -> None:
    with (
        pytest.raises(InvalidReceiptError, match=REMEDY),
        sessions.begin() as session,
    ):
        call(session, Message("orders", b"order 1"))
    assert effects(url) == []


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_the_same_is_true_of_async_functions(url: str, driver: str) -> None:
    async with async_sessions_of(url, driver) as sessions:
        with pytest.raises(InvalidReceiptError, match=REMEDY):
            async with sessions.begin() as session:
                await handle_async(session, Message("orders", b""))
    assert effects(url) == []


@pytest.mark.parametrize("terms", [{}, {"batch": 2}], ids=str)
async def test_a_consumers_handler_that_calls_functions_of_its_name_is_dead_lettered(
    terms: dict[str, Any], url: str
) -> None:
    def handle(session: Session, messages: Any) -> None:
        for message in messages if isinstance(messages, list) else [messages]:
            mail(session, message)
            bill(session, message)

    source = MemorySource(Message("orders", b"1"))
    async with consuming(url, source, handle, terms, name="shop") as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
    assert REMEDY in given_up.reason
    assert effects(url) == []


def test_a_message_that_comes_twice_in_one_transaction_is_handled_once(
    url: str, sessions: sessionmaker[Session]
) -> None:
    message = Message("orders", b"")
    seen: list[bool] = []
    with sessions.begin() as session:
        for _ in range(2):
            with guard(session, message.id, consumer="shop") as is_new:
                seen.append(is_new)
        bill(session, message)
        assert not record_receipt(session, message.id, "shop")
    assert seen == [True, False]
    assert effects(url) == []


def test_a_handler_can_run_again_after_a_rollback_to_a_savepoint(
    url: str, sessions: sessionmaker[Session]
) -> None:
    message = Message("orders", b"")
    with sessions.begin() as session:
        savepoint = session.begin_nested()
        bill(session, message)
        savepoint.rollback()
        bill(session, message)
        bill(session, message)
    assert effects(url) == ["bill"]
