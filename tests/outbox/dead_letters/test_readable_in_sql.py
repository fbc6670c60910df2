"""Dead letters in SQL: JSON is shown as JSON, and no payload fails the query."""

import psycopg
import pytest

from outbox.dead_letters import Schema
from pillarbox import Message
from tests.fixtures.dead_letters import give_up
from tests.fixtures.sessions import execute

IN_STRINGS = {"1e131000": '"2e131000', "n": 15}


@pytest.mark.parametrize("schema", ["outbox", "inbox"])
@pytest.mark.parametrize(
    ("content_type", "payload", "shown"),
    [
        ("application/json", b'{"order": 17}', {"order": 17}),
        ("application/json; charset=utf-8", b"[1]", [1]),
        ("application/vnd.acme+json", b'"text"', "text"),
        ("application/json", b"", None),
        ("application/json", b"{", None),
        ("application/json", b"\xff\xfe", None),
        ("application/json", b'"\\u0000"', None),
        ("application/json", b"1e999999", None),
        ("application/json", b"[" * 100_000, None),
        ("application/json", b"[%s]" % b",".join([b"1e131000"] * 9000), None),
        ("application/json", b'{"a": "\\"", "b": 0E-00100}', None),
        ("application/json", b'{"1e131000": "\\"2e131000", "n": 1.5e1}', IN_STRINGS),
        ("text/plain", b"17", None),
        ("application/jsonlines", b"17", None),
    ],
    ids=[
        "object",
        "charset",
        "suffix",
        "empty",
        "cut off",
        "not UTF-8",
        "NUL",
        "too large a number",
        "too deep",
        "too long numbers",
        "many zeros",
        "long numbers only in strings",
        "text",
        "no JSON",
    ],
)
def test_a_payload_is_json_only_if_it_is_valid_json(
    database_url: str,
    schema: Schema,
    content_type: str,
    payload: bytes,
    shown: object,
) -> None:
    message = Message("t", payload, content_type=content_type)
    give_up(database_url, message, schema=schema)
    query = f"SELECT payload_json, payload FROM {schema}.readable_dead_letter"
    assert execute(database_url, query) == [(shown, payload)]


@pytest.mark.parametrize("schema", ["outbox", "inbox"])
def test_headers_are_shown_unless_their_text_could_be_very_long(
    database_url: str, schema: Schema
) -> None:
    for topic in ("numbers", "small", "strings"):
        give_up(database_url, Message(topic, b""), schema=schema)
    many = "(SELECT jsonb_agg(1e131000) FROM generate_series(1, 9000))"
    for topic, headers in (
        ("numbers", f"jsonb_build_object('n', {many})"),
        ("small", "jsonb_build_object('n', 17)"),
        ("strings", "jsonb_build_object('h', repeat('x', 2000))"),
    ):
        execute(
            database_url,
            f"UPDATE {schema}.dead_letter SET headers = {headers} WHERE topic = %s",
            [topic],
        )

    query = f"SELECT headers FROM {schema}.readable_dead_letter ORDER BY topic"
    assert execute(database_url, query) == [
        ("not shown: they are not an object of strings, and over 1024 bytes",),
        ({"n": 17},),
        ({"h": "x" * 2000},),
    ]


@pytest.mark.parametrize(
    "content_type", ["application/json ; charset=utf-8", "application/vnd.acme+json"]
)
def test_json_is_recognized_where_backslashes_escape(
    database_url: str, content_type: str
) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("SET standard_conforming_strings = off")
        query = "SELECT outbox.json_of(%s, '[1]'::bytea)"
        assert connection.execute(query, [content_type]).fetchone() == ([1],)


def test_a_discard_without_a_reason_is_refused(database_url: str) -> None:
    give_up(database_url, Message("t", b""))
    with pytest.raises(psycopg.errors.CheckViolation, match="discarded_with_a_reason"):
        execute(database_url, "UPDATE outbox.dead_letter SET status = 'DISCARDED'")
