"""A consumer that reads the outbox gives up, and is shown, as over a broker."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy.orm import Session

from inbox.errors import DeadLetter
from inbox.events import (
    MessageDeadLettered,
    MessageHandled,
)
from outbox.testing.events import RecordedEvents
from pillarbox import Message
from tests.brokers.postgres.test_direct import add_direct, direct
from tests.fixtures.consumers import QUICK, consuming
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute

pytestmark = pytest.mark.timeout(180)

LETTERS = (
    "SELECT topic, message_id, attempts, error_reason, octet_length(payload)"
    " FROM inbox.dead_letter"
)
UNSETTLED = "SELECT count(*) FROM outbox.unsettled_message WHERE reader = 'billing'"
HOSTILE: dict[str, tuple[Mapping[str, str], str]] = {
    "an id that is no UUIDv7": ({"id": f"'{uuid4()}'"}, "sha256:"),
    "a reserved header": ({"headers": """'{"ce-id": "1"}'"""}, "sha256:"),
    "an id of another year": ({"id": "'00000000-0000-7000-8000-000000000000'"}, "0000"),
}


def handle(session: Session, message: Message) -> None:
    """Handle anything."""


def refuse(session: Session, message: Message) -> None:
    raise DeadLetter("not for us")


def fail(session: Session, message: Message) -> None:
    raise LookupError("no such order")


@asynccontextmanager
async def reading(
    url: str, handler: Callable[..., Any] = handle, **settings: Any
) -> AsyncIterator[RecordedEvents]:
    """Run the consumer billing, which reads the outbox, for the block."""
    from inbox.sources.postgres.direct import DirectSource

    add_direct(url, "billing")
    source = DirectSource(
        direct(url),
        consumer="billing",
        topics=["*"],
        poll_interval=timedelta(milliseconds=100),
    )
    async with consuming(url, source, handler, retry=QUICK, **settings) as events:
        yield events


def insert_row(url: str, odd: Mapping[str, str]) -> None:
    """Insert a message as a writer in plain SQL can."""
    row = {
        "id": "outbox.uuid7()",
        "lane": "16",
        "topic": "'odd'",
        "content_type": "'text/plain'",
        "payload": "'x'::bytea",
        **odd,
    }
    execute(
        url,
        f"INSERT INTO outbox.message ({', '.join(row)})"
        f" VALUES ({', '.join(row.values())})",
    )


@pytest.mark.parametrize(("odd", "known_by"), HOSTILE.values(), ids=HOSTILE)
async def test_an_unreadable_message_is_one_dead_letter_of_the_consumer(
    database_url: str, odd: Mapping[str, str], known_by: str
) -> None:
    async with reading(database_url) as events:
        insert_row(database_url, odd)
        await events.wait_for(MessageDeadLettered)
        insert(database_url, Message("next", b""))
        await events.wait_for(MessageHandled)
    ((_, id, attempts, reason, size),) = execute(database_url, LETTERS)
    assert id.startswith(known_by)
    assert (attempts, size) == (0, 1)
    assert reason
    assert execute(database_url, "SELECT count(*) FROM outbox.dead_letter") == [(0,)]
    assert execute(database_url, UNSETTLED) == [(0,)]


async def test_a_payload_of_any_size_is_handled_or_one_dead_letter_of_the_consumer(
    database_url: str,
) -> None:
    size = 20 * 1024 * 1024
    large = {"payload": f"convert_to(repeat('x', {size}), 'UTF8')"}
    insert_row(database_url, large)
    sizes: list[int] = []

    def measure(session: Session, message: Message) -> None:
        sizes.append(len(message.payload))

    async with reading(database_url, measure) as events:
        await events.wait_for(MessageHandled)
    insert_row(database_url, large)
    async with reading(database_url, refuse) as events:
        await events.wait_for(MessageDeadLettered)
    assert sizes == [size]
    ((_, _, attempts, reason, stored),) = execute(database_url, LETTERS)
    assert (attempts, reason, stored) == (1, "DeadLetter: not for us", size)
    assert execute(database_url, "SELECT count(*) FROM outbox.dead_letter") == [(0,)]
    assert execute(database_url, UNSETTLED) == [(0,)]
