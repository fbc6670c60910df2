"""PostgreSQL can store a dead letter of any message from any broker."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import cast
from uuid import UUID

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg.rows import TupleRow
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

from pillarbox import Message, uuid7
from pillarbox.inbox.consuming.settlement import problem_of
from pillarbox.inbox.dead_letters.write import DeadLetterWriter
from pillarbox.inbox.handlers.sessions import make_executor
from pillarbox.inbox.source import Delivery
from pillarbox.outbox.lane import Priority
from pillarbox.outbox.postgres.connection import sqlalchemy_url

NOISE = "".join(sha256(b"%d" % n).hexdigest() for n in range(500))
# With NUL and lone surrogates, which sources keep of bytes that aren't UTF-8.
TEXTS = st.text(st.characters(), max_size=20) | st.integers(0, 9000).map(
    lambda n: NOISE[:n]
)
BYTES = st.binary(max_size=20) | TEXTS.map(lambda text: text.encode(errors="replace"))
IDS = (
    st.builds(uuid7)
    | st.uuids(allow_nil=True)
    | st.builds(UUID, int=st.integers(0, 2**128 - 1))
)
MESSAGES = st.builds(
    Message,
    TEXTS,
    BYTES,
    key=st.none() | TEXTS,
    tenant=st.none() | TEXTS,
    headers=st.dictionaries(TEXTS, TEXTS, max_size=3),
    id=IDS,
    content_type=TEXTS,
    schema_version=st.integers(0, 10**10),
    priority=st.sampled_from(Priority),
)
PROBLEMS = st.none() | st.just("there is no id")


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
    message=MESSAGES,
    problem=PROBLEMS,
    attempts=st.integers(0, 2**64),
    failure=TEXTS | st.builds(ValueError, TEXTS),
    refusal=st.none() | st.just("DataError, SQLSTATE 22003"),
)
@settings(max_examples=200, deadline=None)
def test_any_dead_letter_can_be_stored(
    writer: DeadLetterWriter,
    connection: psycopg.Connection[TupleRow],
    message: Message,
    problem: str | None,
    attempts: int,
    failure: str | ValueError,
    refusal: str | None,
) -> None:
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
            "DELETE FROM inbox.dead_letter RETURNING payload, priority"
        ).fetchall()
        assert rows == [(message.payload, message.priority)]
