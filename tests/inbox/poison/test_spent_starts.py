"""A message that used up its starts is a dead letter only if it has no receipt."""

from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession

from inbox.events import (
    DuplicateSkipped,
    HandlerDatabaseLost,
    MessageDeadLettered,
    MessageHandled,
)
from inbox.sources.memory import MemorySource
from pillarbox import Consumer, Message
from tests.fixtures.consumers import QUICK, async_sessions_of, consuming, running
from tests.fixtures.sessions import execute

pytestmark = pytest.mark.timeout(180)


async def handle(session: AsyncSession, message: Message) -> None: ...


async def test_a_lookup_that_fails_is_repeated_and_finds_the_receipt(
    database_url: str,
) -> None:
    message = Message("orders", b"")
    source = MemorySource(message)
    failures = [OperationalError("SELECT", {}, Exception("a blink"))]

    def fail_once(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("SELECT inbox.receipt") and failures:
            raise failures.pop()

    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(source, sessions, name="billing", retry=QUICK)
        consumer.handles("orders")(handle)
        engine = sessions.kw["bind"].sync_engine
        event.listen(engine, "before_cursor_execute", fail_once)
        async with running(consumer) as events:
            await events.wait_for(MessageHandled)
            # As if it had died between its commit and its ack.
            source.return_later(message, 3, timedelta(0))
            await events.wait_for(DuplicateSkipped)
    assert failures == []
    assert len(events.of(HandlerDatabaseLost)) == 1
    assert execute(database_url, "SELECT 1 FROM inbox.dead_letter") == []


async def test_a_message_whose_id_no_receipt_can_have_is_dead_lettered_at_once(
    database_url: str,
) -> None:
    source = MemorySource()
    for id in (uuid4(), UUID(int=2**128 - 1)):
        source.return_later(Message("orders", b"", id=id), 3, timedelta(0))
    async with consuming(database_url, source, handle, retry=QUICK) as events:
        await events.wait_for(MessageDeadLettered, 2)
    assert events.of(HandlerDatabaseLost) == []
