"""A consumer that reads the outbox gives up, and is shown, as over a broker."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy.orm import Session

from examples.sealed.aes_gcm import AesGcm
from inbox.errors import DeadLetter
from inbox.events import (
    CodecMissing,
    DeliveryReturned,
    MessageDeadLettered,
    MessageHandled,
)
from inbox.sources.postgres.direct import DirectSource
from outbox.cli.main import main
from outbox.testing.events import RecordedEvents
from pillarbox import Consumer, Message, add
from tests.brokers.postgres.test_direct import add_direct, direct
from tests.fixtures.consumers import QUICK, consuming, sessions_of
from tests.fixtures.dead_letters import retry, states
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


@asynccontextmanager
async def reading(
    url: str, handler: Callable[..., Any] = handle, **settings: Any
) -> AsyncIterator[RecordedEvents]:
    """Run the consumer billing, which reads the outbox, for the block."""
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


async def test_every_message_that_is_given_up_is_a_dead_letter_of_the_consumer(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    poison, refused, failed = (Message(t, b"x") for t in ("poison", "refused", "fails"))
    execute(
        database_url,
        "INSERT INTO inbox.suspect (message_id, message_at, consumer, starts, is_open)"
        " VALUES (%s, inbox.moment_of(%s), 'billing', %s, true)",
        [poison.id, poison.id, QUICK.max_attempts],
    )
    is_fixed = False

    def handle(session: Session, message: Message) -> None:
        if not is_fixed:
            raise DeadLetter("no") if message.topic == "refused" else LookupError("no")

    insert(database_url, poison, refused, failed)
    async with reading(database_url, handle) as events:
        await events.wait_for(MessageDeadLettered, 3)
    letters = {topic: rest for topic, *rest in execute(database_url, LETTERS)}
    assert letters["poison"][:2] == [str(poison.id), QUICK.max_attempts]
    assert "was started 3 times and never finished" in letters["poison"][2]
    assert letters["refused"][:2] == [str(refused.id), 1]
    assert letters["fails"][:2] == [str(failed.id), QUICK.max_attempts]
    assert execute(database_url, "SELECT count(*) FROM outbox.dead_letter") == [(0,)]

    def dead_letters(*argv: str) -> str:
        assert main(["dead-letters", *argv, "--database", database_url]) == 0
        return capsys.readouterr().out

    assert dead_letters("list").count("consumer:billing") == 3
    ((id,),) = execute(database_url, "SELECT id FROM inbox.dead_letter LIMIT 1")
    assert "consumer:billing" in dead_letters("show", str(id))
    dead_letters("discard", "--topic=poison", "--reason=known")
    is_fixed = True
    with sessions_of(database_url) as sessions:
        consumer = Consumer(direct(database_url), sessions, name="billing")
        consumer.handles("*")(handle)
        tally = await retry(consumer.retrier())
    assert tally == {"succeeded": 2}
    async with reading(database_url, handle) as events:
        insert(database_url, Message("next", b""))
        await events.wait_for(MessageHandled)
    assert {status for status, *_ in states(database_url, "inbox")} == {
        "SUCCEEDED",
        "DISCARDED",
    }
    assert execute(database_url, UNSETTLED) == [(0,)]


async def test_a_replay_to_a_consumer_is_refused_and_the_remedies_are_named(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with reading(database_url) as events:
        insert(database_url, Message("orders", b""))
        await events.wait_for(MessageHandled)
    for more in ([], ["--dry-run"]):
        argv = ["replay", "--since=1h", "--reader=billing", *more]
        assert main([*argv, "--database", database_url]) == 2
        said = capsys.readouterr().err
        assert "reader=billing: is a consumer" in said
        assert "pillarbox dead-letters retry --side inbox" in said
        assert "--from-oldest" in said
    assert execute(database_url, "SELECT count(*) FROM outbox.deferral") == [(0,)]


async def test_an_encoded_message_waits_in_the_outbox_for_a_consumer_with_a_codec(
    database_url: str,
) -> None:
    codec = AesGcm({"here": AESGCM.generate_key(256)})
    seen: list[bytes] = []

    def handle(session: Session, message: Message) -> None:
        seen.append(message.payload)

    with sessions_of(database_url) as sessions, sessions.begin() as session:
        add(session, Message("secret", b"1", key="k"), codec=codec)
        add(session, Message("plain", b"2"))
    async with reading(database_url, handle, rollout=timedelta(0)) as events:
        await events.wait_for(CodecMissing)
        await events.wait_for(DeliveryReturned)
        await events.wait_for(MessageHandled)
    assert seen == [b"2"]
    assert execute(database_url, UNSETTLED) == [(1,)]
    async with reading(database_url, handle, codec=codec) as events:
        await events.wait_for(MessageHandled)
    assert seen == [b"2", b"1"]
    assert execute(database_url, "SELECT count(*) FROM inbox.dead_letter") == [(0,)]
