"""A duplicate is skipped, raises an error, or replays messages."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker

import outbox
from inbox import Consumer, idempotent
from inbox.errors import DuplicateMessageError
from inbox.events import DuplicateSkipped, MessageHandled
from inbox.sources.memory import MemorySource
from outbox import Message
from outbox.errors import ConfigError
from tests.fixtures.consumers import async_sessions_of, running, sessions_of
from tests.fixtures.sessions import execute

READY = """
    SELECT s.topic, m.headers ->> 'causation-id'
      FROM outbox.message_status s JOIN outbox.message m USING (id, created_at)
     WHERE s.state = 'ready' ORDER BY s.seq
"""


@pytest.fixture
def sessions(database_url: str) -> Iterator[sessionmaker[Session]]:
    with sessions_of(database_url) as made:
        yield made


def answer(session: Session, message: Message) -> str:
    outbox.add(session, Message("orders.billed", b"1"), Message("orders.mailed", b"2"))
    return "handled"


def test_messages_added_by_a_handler_have_its_causation_id(
    database_url: str, sessions: sessionmaker[Session]
) -> None:
    message = Message("orders.placed", b"")
    with sessions() as session:
        with session.begin():
            assert idempotent(consumer="billing")(answer)(session, message) == "handled"
        with session.begin():
            outbox.add(session, Message("unrelated", b""))

    assert execute(database_url, READY) == [
        ("orders.billed", str(message.id)),
        ("orders.mailed", str(message.id)),
        ("unrelated", None),
    ]


def test_a_causation_id_set_by_the_handler_is_kept(
    database_url: str, sessions: sessionmaker[Session]
) -> None:
    @idempotent(consumer="billing")
    def handle(session: Session, message: Message) -> None:
        headers = {"causation-id": "mine"}
        outbox.add(session, Message("orders.billed", b"", headers=headers))

    with sessions.begin() as session:
        handle(session, Message("orders.placed", b""))
    assert execute(database_url, READY) == [("orders.billed", "mine")]


def only_large(handler: Any) -> Any:
    """Wrap a plain handler so that it isn't called for small messages."""

    @functools.wraps(handler)
    def handle(session: Session, message: Message) -> None:
        if message.payload == b"large":
            handler(session, message)

    return handle


def only_large_async(handler: Any) -> Any:
    """Wrap an async handler so that it isn't called for small messages."""

    @functools.wraps(handler)
    async def handle(session: AsyncSession, message: Message) -> None:
        if message.payload == b"large":
            await handler(session, message)

    return handle


async def check_wrapped(handler: Any, sessions: Any, url: str) -> None:
    messages = [Message("orders", b"small"), Message("orders", b"large")]
    consumer = Consumer(MemorySource(*messages, *messages), sessions, name="shop")
    consumer.handles("*")(handler)
    async with running(consumer) as events:
        handled = await events.wait_for(MessageHandled, 2)
        skipped = await events.wait_for(DuplicateSkipped, 2)
    ids = sorted(message.id for message in messages)
    assert sorted(event.id for event in handled) == ids
    assert sorted(event.id for event in skipped) == ids
    receipts = "SELECT message_id, consumer FROM inbox.receipt ORDER BY message_id"
    assert execute(url, receipts) == [(id, "billing") for id in ids]
    assert len(execute(url, "SELECT topic FROM outbox.message")) == 1


async def test_a_message_that_a_wrapper_keeps_from_its_handler_was_handled(
    database_url: str,
) -> None:
    @only_large
    @idempotent(consumer="billing")
    def handle(session: Session, message: Message) -> None:
        outbox.add(session, Message("orders.billed", b""))

    with sessions_of(database_url) as sessions:
        await check_wrapped(handle, sessions, database_url)


async def test_a_message_that_a_wrapper_keeps_from_its_async_handler_was_handled(
    database_url: str,
) -> None:
    @only_large_async
    @idempotent(consumer="billing")
    async def handle(session: AsyncSession, message: Message) -> None:
        outbox.add(session, Message("orders.billed", b""))

    async with async_sessions_of(database_url) as sessions:
        await check_wrapped(handle, sessions, database_url)


@pytest.mark.parametrize("terms", [{}, {"batch": 2}], ids=str)
async def test_a_handler_can_call_an_idempotent_function_of_its_consumer(
    terms: dict[str, Any], database_url: str
) -> None:
    @idempotent(consumer="shop")
    def bill(session: Session, message: Message) -> None:
        outbox.add(session, Message("orders.billed", b""))

    def handle(session: Session, messages: Any) -> None:
        for message in messages if isinstance(messages, list) else [messages]:
            for _ in range(2):
                bill(session, message)

    messages = [Message("orders", b"1"), Message("orders", b"2")]
    with sessions_of(database_url) as sessions:
        source = MemorySource(*messages, *messages)
        consumer = Consumer(source, sessions, name="shop")
        consumer.handles("*", **terms)(handle)
        async with running(consumer) as events:
            await events.wait_for(MessageHandled, 2)
            await events.wait_for(DuplicateSkipped, 2)
    added = execute(database_url, "SELECT topic FROM outbox.message")
    assert added == [("orders.billed",)] * 2


async def test_an_async_handler_can_call_an_idempotent_function_of_its_consumer(
    database_url: str,
) -> None:
    @idempotent(consumer="shop")
    async def bill(session: AsyncSession, message: Message) -> None:
        outbox.add(session, Message("orders.billed", b""))

    message = Message("orders", b"")
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(MemorySource(message, message), sessions, name="shop")
        consumer.handles("*")(functools.partial(bill))
        async with running(consumer) as events:
            await events.wait_for(MessageHandled)
            await events.wait_for(DuplicateSkipped)
    added = execute(database_url, "SELECT topic FROM outbox.message")
    assert added == [("orders.billed",)]


def test_a_duplicate_can_raise_an_error(sessions: sessionmaker[Session]) -> None:
    message = Message("orders.placed", b"")
    handle = idempotent(consumer="billing", on_duplicate="raise")(answer)
    with sessions.begin() as session:
        handle(session, message)

    with (
        pytest.raises(DuplicateMessageError, match="handled it before"),
        sessions.begin() as session,
    ):
        handle(session, message)


def test_an_invalid_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="use one of skip, raise"):
        idempotent(consumer="billing", on_duplicate="again")  # type: ignore[call-overload]
