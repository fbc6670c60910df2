"""A relay and a consumer inside an application, as in FastAPI's lifespan."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI
from sqlalchemy.ext.asyncio import AsyncSession

from inbox.events import MessageHandled
from outbox.errors import DatabaseUnavailableError
from outbox.testing.events import RecordedEvents
from pillarbox import Consumer, Message, Relay, add
from relay.publishers.postgres import PostgresPublisher
from tests.fixtures.consumers import async_sessions_of
from tests.fixtures.publisher import ScriptedPublisher


async def test_a_service_publishes_and_handles_its_own_messages(
    database_url: str,
) -> None:
    events = RecordedEvents()
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(database_url, sessions, name="billing", observers=[events])

        @consumer.handles("orders.placed")
        async def bill(session: AsyncSession, message: Message) -> None: ...

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            relay = Relay(database_url, PostgresPublisher(database_url))
            async with consumer, relay:
                yield

        app = FastAPI(lifespan=lifespan)
        async with app.router.lifespan_context(app):
            async with sessions.begin() as session:
                add(session, Message("orders.placed", {"order": 1}))
            await events.wait_for(MessageHandled)
        # It can be started again, in the next test of the application.
        async with consumer:
            pass


async def test_what_cannot_start_raises_at_the_beginning_of_the_block() -> None:
    relay = Relay("postgresql://127.0.0.1:1/none", ScriptedPublisher())
    with pytest.raises(DatabaseUnavailableError):
        async with relay:
            raise AssertionError
    assert len(asyncio.all_tasks()) == 1
