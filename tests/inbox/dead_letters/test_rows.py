"""PostgreSQL can store a dead letter of any message from any broker."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg.rows import TupleRow
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

from inbox.consuming.settlement import problem_of
from inbox.dead_letters.write import DeadLetterWriter
from inbox.handlers.sessions import make_executor
from inbox.source import Delivery
from outbox.brokers.kafka.message import message_of
from outbox.brokers.nats.message import decode_message, raw_headers
from outbox.brokers.sqs.message import read
from outbox.cloudevents.fields import from_fields, unreadable_from_fields
from outbox.postgres.connection import sqlalchemy_url
from pillarbox import InvalidMessageError, Message, uuid7

NOISE = "".join(sha256(b"%d" % n).hexdigest() for n in range(500))
TEXTS = st.text(max_size=20) | st.integers(0, 9000).map(lambda n: NOISE[:n])
SOUND_TEXTS = TEXTS.map(lambda text: text.encode(errors="replace").decode())
BYTES = st.binary(max_size=20) | SOUND_TEXTS.map(str.encode)
NUMBERS = st.integers(0, 10**10).map(str)
IDS = st.builds(lambda: str(uuid7())) | st.uuids(allow_nil=True).map(str) | SOUND_TEXTS

Read = tuple[Message, str | None]


def fields_of(prefix: str, named: Mapping[str, str]) -> st.SearchStrategy[Any]:
    """Generate the named attributes, each present or absent, and other headers."""
    values = {
        prefix + name: NUMBERS
        if kind == "number"
        else IDS
        if kind == "id"
        else SOUND_TEXTS
        for name, kind in named.items()
    }
    known = st.fixed_dictionaries({}, optional=values)
    others = st.dictionaries(SOUND_TEXTS, SOUND_TEXTS, max_size=3)
    return st.builds(lambda one, other: {**other, **one}, known, others)


ATTRIBUTES = {
    "id": "id",
    "type": "text",
    "partitionkey": "text",
    "tenant": "text",
    "schemaversion": "number",
}
FIELDS = fields_of(
    "",
    {
        "id": "id",
        "topic": "text",
        "key": "text",
        "tenant": "text",
        "schema_version": "number",
        "payload": "text",
        "content_type": "text",
    },
)


def of_redis(stream: str, fields: Mapping[str, str], raw: bytes) -> Read:
    coded = {name.encode(): value.encode() for name, value in fields.items()}
    if raw:
        coded[raw] = raw
    try:
        return from_fields(coded), None
    except InvalidMessageError as error:
        return unreadable_from_fields(stream, coded), str(error)


class Record:
    """A record as returned by the Kafka client."""

    def __init__(self, headers: Mapping[str, str], raw: bytes) -> None:
        self._headers = [(name, value.encode()) for name, value in headers.items()]
        self._raw = raw

    def headers(self) -> list[tuple[str, bytes]]:
        return [*self._headers, ("raw", self._raw)] if self._raw else self._headers

    def value(self) -> bytes:
        return self._raw

    def key(self) -> bytes:
        return self._raw

    def topic(self) -> str:
        return "orders"


def of_kafka(headers: Mapping[str, str], raw: bytes) -> Read:
    return message_of(cast("Any", Record(headers, raw)))


def of_nats(headers: Mapping[str, str], raw: bytes) -> Read:
    given = {**headers, "raw": raw.decode(errors="surrogateescape")}
    try:
        return decode_message(given, raw), None
    except InvalidMessageError as error:
        return Message("orders", raw, headers=raw_headers(given)), str(error)


def of_sqs(headers: Mapping[str, str], body: str, raw: bytes) -> Read:
    attributes: dict[str, dict[str, Any]] = {
        name: {"StringValue": value} for name, value in headers.items()
    }
    return read(body, {**attributes, "raw": {"BinaryValue": raw}}, place="orders")


READ = (
    st.builds(of_redis, SOUND_TEXTS, FIELDS, BYTES)
    | st.builds(of_kafka, fields_of("ce_", ATTRIBUTES), BYTES)
    | st.builds(of_nats, fields_of("ce-", ATTRIBUTES), BYTES)
    | st.builds(of_sqs, fields_of("ce-", ATTRIBUTES), SOUND_TEXTS, BYTES)
    | st.builds(
        lambda topic, key, version: (
            Message(topic, b"", key=key, tenant=key, schema_version=version),
            None,
        ),
        TEXTS,
        TEXTS,
        st.integers(0, 10**10),
    )
)


@dataclass(frozen=True)
class PartialDelivery:
    """The attributes of a delivery that are used here."""

    message: Message
    problem: str | None


@pytest.fixture(scope="module")
def writer(connection: psycopg.Connection[TupleRow]) -> Iterator[DeadLetterWriter]:
    info = connection.info
    url = f"postgresql://{info.user}@{info.host}:{info.port}/{info.dbname}"
    engine = create_engine(sqlalchemy_url(url))
    executor = make_executor(sessionmaker(engine), "billing", 1)
    yield DeadLetterWriter("billing", executor)
    asyncio.run(executor.close())
    engine.dispose()


@given(
    found=READ,
    attempts=st.integers(0, 2**64),
    failure=TEXTS | st.builds(ValueError, TEXTS),
    refusal=st.none() | st.just("DataError, SQLSTATE 22003"),
)
@settings(max_examples=400, deadline=None)
def test_any_dead_letter_can_be_stored(
    writer: DeadLetterWriter,
    connection: psycopg.Connection[TupleRow],
    found: Read,
    attempts: int,
    failure: str | ValueError,
    refusal: str | None,
) -> None:
    message, problem = found
    delivery = cast("Delivery", PartialDelivery(message, problem))
    written = asyncio.run(
        writer.write(
            message,
            attempts=attempts,
            failure=failure,
            readable=problem_of(delivery) is None,
            refusal=refusal,
        )
    )
    if written.is_new:
        rows = connection.execute(
            "DELETE FROM inbox.dead_letter RETURNING payload"
        ).fetchall()
        assert rows == [(message.payload,)]
