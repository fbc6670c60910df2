"""Payloads never appear in logs, events or error texts, whatever goes wrong."""

import logging
import pkgutil
from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from importlib import import_module
from typing import Any, get_type_hints

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import text
from sqlalchemy.orm import Session

import pillarbox
import pillarbox.inbox.events
import pillarbox.relay.events
from examples.sealed.aes_gcm import AesGcm
from pillarbox import Consumer, Message
from pillarbox.inbox.errors import RetryLater
from pillarbox.inbox.events import MessageDeadLettered, MessageHandled
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.events import Event
from pillarbox.outbox.observability.logging import LogEvents
from pillarbox.outbox.payload.payload_codec import encoded
from pillarbox.relay.events import BatchSettled
from pillarbox.relay.publisher import Acked, Confirmation, Nacked
from tests.fixtures.consumers import QUICK, sessions_of
from tests.fixtures.consumers import running as consuming
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import insert, running
from tests.fixtures.sessions import execute

SECRET = "5ecre7"
SEEN = (SECRET, SECRET.encode().hex())
lost = AesGcm({"gone": AESGCM.generate_key(256)})
codec = AesGcm({"here": AESGCM.generate_key(256)})


def events(kind: type[Event] = Event) -> Iterator[type[Event]]:
    for each in kind.__subclasses__():
        yield each
        yield from events(each)


PACKAGES = {"pillarbox.outbox", "pillarbox.relay", "pillarbox.inbox"}
for module in pkgutil.walk_packages(pillarbox.__path__, "pillarbox."):
    if module.name.endswith(".events"):
        import_module(module.name)


def package_of(kind: type[Event]) -> str:
    return ".".join(kind.__module__.split(".")[:2])


KINDS = [e for e in events() if package_of(e) in PACKAGES]


def leaks(said: str) -> list[str]:
    return [form for form in SEEN if form in said]


def test_no_event_has_a_field_for_a_payload() -> None:
    assert {package_of(kind) for kind in KINDS} == PACKAGES
    assert len(KINDS) > 30
    for kind in KINDS:
        hints = get_type_hints(kind)
        for field in fields(kind):
            assert "payload" not in field.name, kind
            assert "headers" not in field.name, kind
            assert "bytes" not in str(hints[field.name]), kind
            assert "Message" not in str(hints[field.name]), kind
            assert hints[field.name] not in {object, Any}, kind


def refuse(message: Message) -> Confirmation:
    return Acked() if message.topic == "good" else Nacked("refused", message.key == "p")


async def test_a_relay_reveals_no_payload(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    messages = [Message(topic, SECRET, key=topic[:1]) for topic in ("good", "bad", "p")]
    insert(database_url, *messages)
    insert(database_url, Message("lost", SECRET), codec=lost)
    # PostgreSQL refuses this row, and quotes its values in the error's detail.
    execute(
        database_url,
        "ALTER TABLE outbox.dead_letter ADD CONSTRAINT fussy"
        " CHECK (topic <> 'bad' OR retry_count > 0)",
    )

    async with running(database_url, ScriptedPublisher(refuse), codec=codec) as it:
        await it.events.wait_for(pillarbox.relay.events.DatabaseLost)
        execute(database_url, "ALTER TABLE outbox.dead_letter DROP CONSTRAINT fussy")
        await it.events.wait_for(BatchSettled)
    for event in it.events.events:
        LogEvents()(event)

    assert "DatabaseLost" in caplog.text
    assert not leaks(caplog.text)
    assert not leaks(repr(it.events.events))


async def test_a_consumer_reveals_no_payload(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    execute(database_url, "CREATE TABLE person (name text CHECK (name = 'nobody'))")
    asked: list[Any] = []

    def handle(session: Session, message: Message) -> None:
        match message.topic:
            case "later" if not asked:
                asked.append(message.id)
                raise RetryLater(timedelta(0))
            case "database":
                name = message.json()
                session.execute(
                    text("INSERT INTO person VALUES (:name)"), {"name": name}
                )
            case "adds":
                pillarbox.add(session, Message("t", message.payload), Message("t", b""))
                session.connection().execute(text("SET TRANSACTION READ ONLY"))
                session.flush()

    topics = ["good", "later", "database", "adds", "unhandled"]
    source = MemorySource(
        *(Message(topic, SECRET) for topic in topics),
        encoded(Message("good", SECRET), lost),
    )
    # At first, writing a dead letter fails, with an error that quotes all its values.
    execute(
        database_url,
        "ALTER TABLE inbox.dead_letter ADD CONSTRAINT fussy CHECK (retry_count > 0)",
    )
    with sessions_of(database_url) as sessions:
        consumer = Consumer(
            source,
            sessions,
            name="c",
            codec=codec,
            retry=QUICK,
            rollout=timedelta(0),
        )
        consumer.observe(LogEvents())
        for topic in topics[:-1]:
            consumer.handles(topic)(handle)
        async with consuming(consumer) as recorded:
            await recorded.wait_for(pillarbox.inbox.events.HandlerDatabaseLost)
            execute(database_url, "ALTER TABLE inbox.dead_letter DROP CONSTRAINT fussy")
            await recorded.wait_for(MessageDeadLettered, 4)
            await recorded.wait_for(MessageHandled, 2)

    assert "HandlerDatabaseLost" in caplog.text
    assert not leaks(caplog.text)
    assert not leaks(repr(recorded.events))
    traces = execute(
        database_url, "SELECT error_reason, error_stacktrace FROM inbox.dead_letter"
    )
    assert len(traces) == 4
    assert not leaks(repr(traces))
    assert sum("Traceback" in (trace or "") for _, trace in traces) >= 2
