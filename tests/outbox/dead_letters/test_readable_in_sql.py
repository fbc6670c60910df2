"""Dead letters in SQL: JSON is shown as JSON, and no payload fails the query."""

import psycopg
import pytest

from pillarbox import Message
from pillarbox.outbox.dead_letters.statement import Schema
from tests.fixtures.dead_letters import give_up
from tests.fixtures.sessions import execute

JSON = "application/json"
IN_STRINGS = {"1e131000": '"2e131000', "n": 15}
PAYLOADS: dict[str, tuple[str, bytes, object]] = {
    "object": (JSON, b'{"order": 17}', {"order": 17}),
    "charset": ("application/json; charset=utf-8", b"[1]", [1]),
    "suffix": ("application/vnd.acme+json", b'"text"', "text"),
    "empty": (JSON, b"", None),
    "cut off": (JSON, b"{", None),
    "not UTF-8": (JSON, b"\xff\xfe", None),
    "NUL": (JSON, b'"\\u0000"', None),
    "too large a number": (JSON, b"1e999999", None),
    "too deep": (JSON, b"[" * 100_000, None),
    "too long numbers": (JSON, b"[%s]" % b",".join([b"1e131000"] * 9000), None),
    "many zeros": (JSON, b'{"a": "\\"", "b": 0E-00100}', None),
    "long numbers only in strings": (
        JSON,
        b'{"1e131000": "\\"2e131000", "n": 1.5e1}',
        IN_STRINGS,
    ),
    "text": ("text/plain", b"17", None),
    "no JSON": ("application/jsonlines", b"17", None),
}
"""The content type, the payload, and the JSON shown for it."""


@pytest.mark.parametrize("schema", ["outbox", "inbox"])
def test_a_payload_is_json_only_if_it_is_valid_json(
    database_url: str, schema: Schema
) -> None:
    for what, (content_type, payload, _) in PAYLOADS.items():
        message = Message(what, payload, content_type=content_type)
        give_up(database_url, message, schema=schema)

    query = f"SELECT topic, payload_json, payload FROM {schema}.readable_dead_letter"
    found = {topic: row for topic, *row in execute(database_url, query)}

    for what, (_, payload, shown) in PAYLOADS.items():
        assert (what, *found[what]) == (what, shown, payload)


@pytest.mark.parametrize("schema", ["outbox", "inbox"])
def test_headers_are_shown_unless_their_text_could_be_very_long(
    database_url: str, schema: Schema
) -> None:
    for topic in ("numbers", "small", "strings"):
        give_up(database_url, Message(topic, b""), schema=schema)
    many = "(SELECT jsonb_agg(1e131000) FROM generate_series(1, 200))"
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


def test_json_is_recognized_where_backslashes_escape(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("SET standard_conforming_strings = off")
        query = "SELECT outbox.json_of(%s, '[1]'::bytea)"
        for kind in ("application/json ; charset=utf-8", "application/vnd.acme+json"):
            found = connection.execute(query, [kind]).fetchone()
            assert (kind, found) == (kind, ([1],))


def test_a_discard_without_a_reason_is_refused(database_url: str) -> None:
    give_up(database_url, Message("t", b""))
    with pytest.raises(psycopg.errors.CheckViolation, match="discarded_with_a_reason"):
        execute(database_url, "UPDATE outbox.dead_letter SET status = 'DISCARDED'")
