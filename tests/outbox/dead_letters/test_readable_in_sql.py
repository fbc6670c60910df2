"""Dead letters in SQL: JSON is shown as JSON, and no payload fails the query."""

import psycopg
import pytest

from outbox import Message
from outbox.dead_letters import Schema
from tests.fixtures.dead_letters import give_up
from tests.fixtures.sessions import execute


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


def test_a_discard_without_a_reason_is_refused(database_url: str) -> None:
    give_up(database_url, Message("t", b""))
    with pytest.raises(psycopg.errors.CheckViolation, match="discarded_with_a_reason"):
        execute(database_url, "UPDATE outbox.dead_letter SET status = 'DISCARDED'")
