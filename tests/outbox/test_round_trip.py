"""Any text and bytes in a message reach the table unchanged."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg.rows import TupleRow
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

import pillarbox
from pillarbox import Message
from pillarbox.outbox.lane import Priority, lane_of
from pillarbox.outbox.limits import reserved_header
from pillarbox.outbox.postgres.connection import sqlalchemy_url

CHARACTERS = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
# Characters with a meaning in array, bytea or JSON literals.
AWKWARD = st.text(
    st.sampled_from("\"\\{}(),; \t\r\n'%:$NUL\b\x7f\u00a0\u2028😀"), max_size=12
)
TEXTS = (st.text(CHARACTERS, max_size=30) | AWKWARD).filter(bool) | st.sampled_from(
    ["NULL", "null", "{}", '""', "\\", '"', "\\x00", " ", "%s", ":a", "%(a)s"]
)
# Hypothesis also tries strings that it finds in the source, such as content-type.
HEADERS = st.dictionaries(
    TEXTS.filter(lambda name: reserved_header([name]) is None),
    TEXTS | st.just(""),
    max_size=3,
)
NOW = datetime.now(UTC)
MESSAGES = st.builds(
    Message,
    TEXTS,
    st.binary(max_size=40),
    key=st.none() | TEXTS,
    tenant=st.none() | TEXTS,
    headers=HEADERS,
    content_type=TEXTS,
    schema_version=st.integers(1, 2**31 - 1),
    priority=st.sampled_from(Priority),
    available_at=st.none()
    | st.timedeltas(timedelta(days=-400), timedelta(days=5)).map(lambda t: NOW + t),
)


@pytest.fixture(scope="module")
def engine(connection: psycopg.Connection[TupleRow]) -> Iterator[Engine]:
    info = connection.info
    engine = create_engine(
        sqlalchemy_url(
            f"postgresql://{info.user}@{info.host}:{info.port}/{info.dbname}"
        )
    )
    yield engine
    engine.dispose()


def rows_and_headers(
    session: Session, messages: Sequence[Message]
) -> list[tuple[object, Mapping[str, str]]]:
    cursor = session.connection().connection.cursor()
    cursor.execute(
        "SELECT topic, payload, key, tenant, content_type, schema_version,"
        " available_at, lane, headers FROM outbox.message"
        " WHERE id = ANY (%s) ORDER BY seq",
        ([message.id for message in messages],),
    )
    return [
        ((*fields, due and due.astimezone(UTC), lane), headers)
        for *fields, due, lane, headers in cursor.fetchall()
    ]


def expected(message: Message) -> tuple[object, Mapping[str, str]]:
    return (
        message.topic,
        message.payload,
        message.key,
        message.tenant,
        message.content_type,
        message.schema_version,
        message.available_at,
        lane_of(message.key, message.id, message.priority),
    ), dict(message.headers)


@given(st.lists(MESSAGES, min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_messages_added_by_a_session_or_a_statement_arrive_unchanged(
    engine: Engine, messages: list[Message]
) -> None:
    with Session(engine) as session:
        pillarbox.add(session, *messages)
        session.flush()
        assert rows_and_headers(session, messages) == [expected(m) for m in messages]
        session.rollback()
        session.execute(pillarbox.insert_statement(*messages))
        assert rows_and_headers(session, messages) == [expected(m) for m in messages]
