"""Relay and consumer in the process of an application, as README and pages show."""

import logging

import pytest
from sqlalchemy.orm import Session

from inbox.events import HandlerFailed, MessageDeadLettered, MessageHandled
from outbox.testing.events import RecordedEvents
from pillarbox import Consumer, DeadLetter, Message, Relay, add
from relay.events import RelayStarted
from tests.fixtures.consumers import sessions_of


async def test_both_take_urls_and_log_what_their_commands_would(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pillarbox")
    events = RecordedEvents()
    with sessions_of(database_url) as sessions:
        consumer = Consumer(database_url, sessions, name="billing")
        consumer.observe(events)

        @consumer.handles("orders.placed")
        def bill(session: Session, message: Message) -> None:
            if message.payload == b"no":
                raise DeadLetter

        async with consumer, Relay(database_url, database_url):
            with sessions.begin() as session:
                for payload in (b"yes", b"no"):
                    add(session, Message("orders.placed", payload))
            await events.wait_for(MessageHandled)
            await events.wait_for(MessageDeadLettered)

    logged = [record.message.partition(" ")[0] for record in caplog.records]
    assert logged.count(MessageDeadLettered.__name__) == 1
    assert RelayStarted.__name__ in logged
    assert HandlerFailed.__name__ not in logged
