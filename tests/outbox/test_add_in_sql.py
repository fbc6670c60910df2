"""Adding messages in SQL: the forms of outbox.add, and what they refuse."""

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import TupleRow

from pillarbox import uuid7
from pillarbox.outbox.lane import Priority, lane_of
from pillarbox.outbox.message_id import is_uuid7


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection[TupleRow]]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


def add(connection: psycopg.Connection[TupleRow], arguments: str) -> UUID:
    row = connection.execute(f"SELECT outbox.add({arguments})").fetchone()
    assert row is not None
    assert isinstance(row[0], UUID)
    return row[0]


def test_json_is_added_as_json_text(connection: psycopg.Connection[Any]) -> None:
    id = add(connection, """'orders.placed', '{"order": 1}'::jsonb, key => 'ä'""")

    row = connection.execute(
        "SELECT id, topic, payload, key, content_type, headers, schema_version, lane,"
        " available_at FROM outbox.message"
    ).fetchone()
    assert is_uuid7(id)
    assert row == (
        *(id, "orders.placed", b'{"order": 1}', "ä", "application/json", {}, 1),
        *(lane_of("ä", id, Priority.DEFAULT), None),
    )


def test_bytes_are_added_unchanged(connection: psycopg.Connection[Any]) -> None:
    id = uuid7()

    given = add(
        connection,
        f"""'t', '\\x00ff'::bytea, NULL, 'acme', '{{"a": "b"}}', 'text/xml', 2, 'bulk',
            now() + interval '1 hour', '{id}'""",
    )

    assert given == id
    row = connection.execute(
        "SELECT payload, key, tenant, headers, content_type, schema_version, lane,"
        " available_at > now() FROM outbox.message"
    ).fetchone()
    lane = lane_of(None, id, Priority.BULK)
    assert row == (b"\0\xff", None, "acme", {"a": "b"}, "text/xml", 2, lane, True)


UNTYPED = [
    """'t', '{"a": 1}'""",
    """'t', '{"a": 1}', 'k'""",
    """'t', '{"a": 1}', key => 'k', priority => 'bulk'""",
    """topic => 't', payload => '{"a": 1}'""",
    """'t', '{"a": ' || 1 || '}'""",
    """'t'::text, '{"a": 1}'::text, content_type => 'application/vnd.shop+json'""",
    """'t', '{"a": 1}', content_type => 'Application/JSON; charset=utf-8'""",
    """'t', '{"a": 1}'::varchar""",
]


def test_untyped_text_is_json_and_that_of_a_text_type_is_added_unchanged(
    connection: psycopg.Connection[Any],
) -> None:
    added = [(id, b'{"a": 1}') for id in (add(connection, it) for it in UNTYPED)]
    connection.execute("SELECT outbox.add(%s, %s)", ("t", '{"a": 1.10}'))
    add(connection, "'t', 'Grüße', content_type => 'text/plain'")

    rows = connection.execute("SELECT id, payload FROM outbox.message ORDER BY seq")
    *literals, parameter, text = rows.fetchall()
    assert literals == added
    assert parameter[1] == b'{"a": 1.10}'
    assert text[1] == "Grüße".encode()


MISMATCHED = [
    ("""'t', '{"a": 1'""", "invalid input syntax for type json"),
    ("'t', ''", "invalid input syntax for type json"),
    (
        "'t', '\\x00ff', content_type => 'application/octet-stream'",
        "payload is text, and content_type is application/octet-stream",
    ),
    ("'t', NULL", "payload is null"),
    ("'', '{}'", "topic is empty"),
]


def test_text_that_does_not_match_its_content_type_is_refused(
    connection: psycopg.Connection[Any],
) -> None:
    for arguments, problem in MISMATCHED:
        with pytest.raises(psycopg.errors.DataError, match=problem):
            add(connection, arguments)

    assert connection.execute("SELECT 1 FROM outbox.message").fetchall() == []


def test_a_trigger_adds_in_the_transaction_of_its_statement(
    connection: psycopg.Connection[Any],
) -> None:
    connection.execute("CREATE TABLE shop_order (id int)")
    connection.execute(
        """
        CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM outbox.add('orders.placed', to_jsonb(NEW), key => NEW.id::text);
            RETURN NULL;
        END $$
        """
    )
    connection.execute(
        "CREATE TRIGGER tell AFTER INSERT ON shop_order"
        " FOR EACH ROW EXECUTE FUNCTION tell()"
    )

    connection.execute("INSERT INTO shop_order VALUES (1), (2)")
    with connection.transaction(force_rollback=True):
        connection.execute("INSERT INTO shop_order VALUES (3)")

    rows = connection.execute("SELECT key FROM outbox.message ORDER BY seq").fetchall()
    assert rows == [("1",), ("2",)]


VIOLATING = [
    ("NULL, '{}'::jsonb", "topic is empty"),
    ("'', '{}'::jsonb", "topic is empty"),
    ("repeat('t', 256), '{}'::jsonb", "topic has 256 characters, the limit is 255"),
    ("'t', NULL::jsonb", "payload is null"),
    ("'t', NULL::bytea", "payload is null"),
    (
        "'t', convert_to(repeat('x', 1048577), 'UTF8')",
        "payload has 1048577 bytes, the limit is 1048576",
    ),
    ("'t', '{}'::jsonb, key => ''", "key is empty: leave it null"),
    (
        "'t', '{}'::jsonb, key => repeat('k', 513)",
        "key has 513 characters, the limit is 512",
    ),
    ("'t', '{}'::jsonb, tenant => ''", "tenant must have 1 to 255 characters"),
    (
        "'t', '{}'::jsonb, tenant => repeat('t', 256)",
        "tenant must have 1 to 255 characters",
    ),
    ("'t', '{}'::jsonb, content_type => ''", "content_type is empty"),
    ("'t', '{}'::jsonb, content_type => NULL", "content_type is empty"),
    ("'t', '{}'::jsonb, schema_version => 0", "schema_version is 0, it starts at"),
    ("'t', '{}'::jsonb, schema_version => NULL", "schema_version is null"),
    ("'t', '{}'::jsonb, priority => 'urgent'", "priority is 'urgent', not real"),
    ("'t', '{}'::jsonb, priority => NULL", "priority is NULL, not realtime"),
    (
        "'t', '{}'::jsonb, available_at => now() + interval '7 days'",
        "more than 6 days ahead",
    ),
    ("'t', '{}'::jsonb, available_at => 'infinity'", "more than 6 days ahead"),
    ("'t', '{}'::jsonb, id => gen_random_uuid()", "is not a UUIDv7"),
    ("'t', '{}'::jsonb, headers => NULL", "headers is not a JSON object"),
    ("'t', '{}'::jsonb, headers => '[]'", "headers is not a JSON object"),
    ("'t', '{}'::jsonb, headers => '1'", "headers is not a JSON object"),
    ("""'t', '{}'::jsonb, headers => '{"a": 1}'""", "value that is not a string"),
    (
        """'t', '{}'::jsonb, headers => '{"a": ["b"]}'""",
        "value that is not a string",
    ),
    ("""'t', '{}'::jsonb, headers => '{"a": []}'""", "value that is not a string"),
    (
        """'t', '{}'::jsonb, headers => '{"a": null}'""",
        "value that is not a string",
    ),
    (
        "'t', '{}'::jsonb, headers => jsonb_build_object('a', repeat('x', 20000))",
        "headers",
    ),
    (
        "'t', '{}'::jsonb, id => '00000000-0000-7000-8000-000000000000'",
        "make a new one",
    ),
    (
        "'t', '{}'::jsonb, content_type => repeat('c', 256)",
        "content_type has 256 characters, the limit is 255",
    ),
]


def test_a_violated_limit_is_named_and_nothing_is_added(
    connection: psycopg.Connection[Any],
) -> None:
    for arguments, problem in VIOLATING:
        with pytest.raises(psycopg.errors.InvalidParameterValue) as refusal:
            add(connection, arguments)

        said = refusal.value.diag
        assert (said.message_primary or "").startswith("outbox.add: "), arguments
        assert problem in (said.message_primary or ""), arguments
        assert "nothing was added" in (said.message_hint or ""), arguments
    assert connection.execute("SELECT 1 FROM outbox.message").fetchall() == []
