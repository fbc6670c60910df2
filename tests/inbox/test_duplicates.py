"""A duplicate is skipped, raises an error, or replays messages."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker

import pillarbox
from inbox.events import DuplicateSkipped, MessageHandled
from inbox.sources.memory import MemorySource
from pillarbox import Message, idempotent
from tests.fixtures.consumers import consuming, sessions_of
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
    pillarbox.add(
        session, Message("orders.billed", b"1"), Message("orders.mailed", b"2")
    )
    return "handled"


def test_messages_added_by_a_handler_have_its_causation_id(
    database_url: str, sessions: sessionmaker[Session]
) -> None:
    message = Message("orders.placed", b"")
    with sessions() as session:
        with session.begin():
            assert idempotent(consumer="billing")(answer)(session, message) == "handled"
        with session.begin():
            pillarbox.add(session, Message("unrelated", b""))

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
        pillarbox.add(session, Message("orders.billed", b"", headers=headers))

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


@only_large
@idempotent(consumer="billing")
def handle(session: Session, message: Message) -> None:
    pillarbox.add(session, Message("orders.billed", b""))


@only_large_async
@idempotent(consumer="billing")
async def handle_async(session: AsyncSession, message: Message) -> None:
    pillarbox.add(session, Message("orders.billed", b""))


@pytest.mark.parametrize("handler", [handle, handle_async])
async def test_a_message_that_a_wrapper_keeps_from_its_handler_was_handled(
    handler: Any, database_url: str
) -> None:
    messages = [Message("orders", b"small"), Message("orders", b"large")]
    source = MemorySource(*messages, *messages)
    async with consuming(database_url, source, handler, name="shop") as events:
        handled = await events.wait_for(MessageHandled, 2)
        skipped = await events.wait_for(DuplicateSkipped, 2)
    ids = sorted(message.id for message in messages)
    assert sorted(event.id for event in handled) == ids
    assert sorted(event.id for event in skipped) == ids
    receipts = "SELECT message_id, consumer FROM inbox.receipt ORDER BY message_id"
    assert execute(database_url, receipts) == [(id, "billing") for id in ids]
    assert len(execute(database_url, "SELECT topic FROM outbox.message")) == 1
