"""Payloads stay encrypted from `add` to relay or handler; a lost key stops neither."""

from dataclasses import dataclass
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session

import pillarbox
from examples.sealed.aes_gcm import AesGcm
from pillarbox import Consumer, Message, idempotent
from pillarbox.inbox.errors import DeadLetter
from pillarbox.inbox.events import MessageDeadLettered, MessageHandled
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.inbox.webhook import WebhookFailed
from pillarbox.outbox.errors import ConfigError, InvalidMessageError
from pillarbox.outbox.limits import Limits
from pillarbox.outbox.payload.payload_codec import CODEC_HEADER, decoded, encoded
from pillarbox.outbox.payload.schema_registry import SchemaRegistry
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.testing.events import RecordedEvents
from pillarbox.relay.events import BatchSettled
from pillarbox.relay.events import MessageDeadLettered as RelayDeadLettered
from pillarbox.relay.publishers.http import HttpPublisher
from tests.fixtures.consumers import async_sessions_of, sessions_of
from tests.fixtures.consumers import running as consuming
from tests.fixtures.dead_letters import give_up, retry, states
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import make_due, running
from tests.fixtures.sessions import execute
from tests.fixtures.webhook import OPTIONS, hook_app, served

SECRET = b"the patient's name"
KEYS = {"new": AESGCM.generate_key(256)}
codec = AesGcm(KEYS)
forgetful = AesGcm({"newer": AESGCM.generate_key(256)})
STORED = "SELECT topic, payload, content_type, headers FROM outbox.message ORDER BY seq"


def message(topic: str = "patients", **fields: Any) -> Message:
    return Message(topic, SECRET, content_type="text/plain", key="k", **fields)


def add(url: str, *messages: Message, with_codec: AesGcm = codec) -> None:
    engine = create_engine(sqlalchemy_url(url))
    with Session(engine) as session, session.begin():
        pillarbox.add(session, *messages, codec=with_codec)
    engine.dispose()


def test_a_strict_codec_refuses_what_is_not_encrypted() -> None:
    strict = AesGcm(KEYS, strict=True)
    assert decoded(encoded(message(), codec), strict).payload == SECRET
    plain = message()
    assert decoded(plain, codec) is plain
    with pytest.raises(InvalidMessageError, match="the codec is strict") as refused:
        decoded(message(headers={"token": "secret"}), strict)
    assert "secret" not in str(refused.value)


def test_the_table_contains_no_plain_text(database_url: str) -> None:
    add(database_url, message(), message(headers={"traceparent": "00"}))
    engine = create_engine(sqlalchemy_url(database_url))
    with engine.begin() as connection:
        connection.execute(pillarbox.insert_statement(message(), codec=codec))
    engine.dispose()

    rows = execute(database_url, STORED)
    assert [content_type for _, _, content_type, _ in rows] == [
        "application/octet-stream"
    ] * 3
    assert {headers[CODEC_HEADER] for *_, headers in rows} == {"aes-gcm:new"}
    assert not any(SECRET in payload for _, payload, _, _ in rows)


def test_schemas_apply_before_the_codec_and_limits_before_and_after_it(
    database_url: str,
) -> None:
    registry = SchemaRegistry()
    registry.register("patients", {"type": "object", "required": ["name"]})
    engine = create_engine(sqlalchemy_url(database_url))
    with Session(engine) as session:
        wrong = Message("patients", {"nam": 1})
        with pytest.raises(InvalidMessageError, match="required"):
            pillarbox.add(session, wrong, codec=codec, registry=registry)
        limits = Limits(max_payload_bytes=len(SECRET))
        with pytest.raises(InvalidMessageError, match="over the limit"):
            pillarbox.add(session, message(), codec=codec, limits=limits)
        assert not session.new
    engine.dispose()


async def test_the_relay_decodes_before_it_publishes_and_dead_letters_the_undecodable(
    database_url: str,
) -> None:
    add(database_url, message("lost"), with_codec=forgetful)
    plain = message("kept", headers={"traceparent": "00"})
    add(database_url, plain)
    publisher = ScriptedPublisher()

    async with running(database_url, publisher, codec=codec) as relay:
        await relay.events.wait_for(BatchSettled)
        await relay.events.wait_for(RelayDeadLettered)

    assert [
        (m.topic, m.payload, m.content_type, m.headers) for m in publisher.acked
    ] == [("kept", plain.payload, plain.content_type, plain.headers)]
    ((topic, payload, reason),) = execute(
        database_url, "SELECT topic, payload, error_reason FROM outbox.dead_letter"
    )
    assert (topic, payload) == ("lost", execute(database_url, STORED)[0][1])
    assert "names a key that codec 'aes-gcm' doesn't have; give it" in reason


@dataclass
class Clinic:
    """A handler that records what it read."""

    read: list[tuple[bytes, str]]

    def __call__(self, _: Session, message: Message) -> None:
        self.read.append((message.payload, message.content_type))


async def test_a_consumer_decodes_before_it_upcasts_and_dead_letters_the_undecodable(
    database_url: str,
) -> None:
    registry = SchemaRegistry()
    registry.register("names", {"type": "object", "required": ["name"]}, version=2)
    lost, kept = encoded(message(), forgetful), encoded(message(), codec)
    old = encoded(Message("names", {"nam": "x"}), codec)
    source = MemorySource(lost, kept, message(), old)
    clinic = Clinic([])
    names = []
    with sessions_of(database_url) as sessions:
        consumer = Consumer(
            source, sessions, name="clinic", codec=codec, registry=registry
        )
        consumer.handles("patients")(clinic)

        @consumer.upcasts("names", to=2)
        def rename(message: Message) -> dict[str, str]:
            return {"name": message.json()["nam"]}

        @consumer.handles("names", version=2)
        def handle(_: Session, message: Message) -> None:
            names.append(message.json())

        async with consuming(consumer) as events:
            await events.wait_for(MessageHandled, 3)
            await events.wait_for(MessageDeadLettered)

    assert clinic.read == [(SECRET, "text/plain")] * 2
    assert names == [{"name": "x"}]
    ((payload, headers, reason),) = execute(
        database_url, "SELECT payload, headers, error_reason FROM inbox.dead_letter"
    )
    assert (payload, headers) == (lost.payload, lost.headers)
    assert "give it the key 'newer', then retry the dead letter" in reason


async def test_a_dead_letter_can_be_retried_once_the_key_is_available(
    database_url: str,
) -> None:
    give_up(database_url, encoded(message(), codec), schema="inbox")
    clinic = Clinic([])
    with sessions_of(database_url) as sessions:
        for with_codec in (None, forgetful, codec):
            consumer = Consumer(
                MemorySource(), sessions, name="billing", codec=with_codec
            )
            consumer.handles("patients")(clinic)
            tally = await retry(consumer.retrier())
            assert tally["succeeded"] == (1 if with_codec is codec else 0)

    assert clinic.read == [(SECRET, "text/plain")]
    ((status, _, _),) = states(database_url, "inbox")
    assert status == "SUCCEEDED"


async def test_a_guard_without_a_codec_hands_no_encoded_payload_to_its_handler(
    database_url: str,
) -> None:
    clinic = Clinic([])
    guarded = idempotent(consumer="clinic")(clinic)
    guarded_async = idempotent(consumer="clinic")(read_nothing)
    stored = encoded(message(), codec)
    needed = pytest.raises(
        ConfigError, match=f"{stored.id}: .* codec 'aes-gcm', .* pass"
    )

    with sessions_of(database_url) as sessions, needed, sessions.begin() as session:
        guarded(session, stored)
    async with async_sessions_of(database_url) as async_sessions:
        with needed:
            async with async_sessions.begin() as async_session:
                await guarded_async(async_session, stored)

    assert clinic.read == []
    assert execute(database_url, "SELECT 1 FROM inbox.receipt") == []


async def read_nothing(_: AsyncSession, message: Message) -> None:
    raise AssertionError(message)


async def test_a_webhook_lets_encoded_messages_wait_until_the_relay_decodes_them(
    inbox_url: str,
    inbox_sessions: async_sessionmaker[AsyncSession],
) -> None:
    add(inbox_url, message())
    events = RecordedEvents()
    clinic: list[bytes] = []

    async def handle(_: AsyncSession, message: Message) -> None:
        clinic.append(message.payload)

    async with served(hook_app(handle, inbox_sessions, events)) as hook:
        publisher = HttpPublisher.from_url(f"{hook}/{OPTIONS}")
        async with running(inbox_url, publisher):
            failed, *_ = await events.wait_for(WebhookFailed)
        assert (failed.status, clinic) == (425, [])
        assert "let the relay decode it, pillarbox relay --codec" in failed.reason
        make_due(inbox_url)
        publisher = HttpPublisher.from_url(f"{hook}/{OPTIONS}")
        async with running(inbox_url, publisher, codec=codec):
            await events.wait_for(MessageHandled)
    assert clinic == [SECRET]


async def test_the_guard_decodes_in_any_consumer(database_url: str) -> None:
    clinic = Clinic([])
    guarded = idempotent(consumer="clinic", codec=codec)(clinic)
    stored, lost = encoded(message(), codec), encoded(message(), forgetful)

    with sessions_of(database_url) as sessions:
        for _ in range(2):
            with sessions.begin() as session:
                guarded(session, stored)
        with (
            pytest.raises(DeadLetter, match="names a key"),
            sessions.begin() as session,
        ):
            guarded(session, lost)

    assert clinic.read == [(SECRET, "text/plain")]
    receipts = execute(database_url, "SELECT message_id FROM inbox.receipt")
    assert receipts == [(stored.id,)]

    read = []

    @idempotent(consumer="clinic", codec=codec)
    async def handle(_: AsyncSession, message: Message) -> None:
        read.append(message.payload)

    async with (
        async_sessions_of(database_url) as async_sessions,
        async_sessions.begin() as async_session,
    ):
        await handle(async_session, encoded(message(), codec))
    assert read == [SECRET]
