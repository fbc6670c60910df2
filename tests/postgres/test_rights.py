"""Each role has what it needs and nothing else, found by trying."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

import outbox
from outbox import Message
from outbox.database import sqlalchemy_url
from outbox.testing.postgres import PostgresServer
from tests.fixtures.postgres import new_database

As: TypeAlias = Callable[[str], AbstractContextManager[psycopg.Connection[Any]]]
REFUSED = psycopg.errors.InsufficientPrivilege
ADD = "SELECT outbox.add('t', '{}'::jsonb, key => 'k')"
RECEIVE = """
    INSERT INTO inbox.receipt (message_id, message_at, consumer)
    SELECT id, inbox.moment_of(id), 'billing' FROM (SELECT outbox.uuid7() AS id) AS m
"""
DELIVER = """
    INSERT INTO inbox.delivery (message_id, lane, schema_version, consumer, topic,
                                content_type, headers, payload)
    VALUES (outbox.uuid7(), 0, 1, 'billing', 't', 'text/plain', '{}', '')
"""
GIVE_UP = """
    INSERT INTO {schema}.dead_letter (origin, message_id, topic, attempts,
        schema_version, content_type, headers, payload, error_reason)
    VALUES ('o', 'm', 't', 1, 1, 'text/plain', '{{}}', '', 'why')
"""

ALLOWED = {
    "application": [ADD],
    "relay": [
        "SELECT * FROM outbox.message",
        "UPDATE outbox.message SET published_at = now()",
        "UPDATE outbox.message SET attempts = 1, available_at = now(), last_error = ''",
        GIVE_UP.format(schema="outbox"),
        "SELECT * FROM outbox.dead_letter",
        "SELECT * FROM outbox.readable_dead_letter",
        DELIVER,
        "SELECT * FROM inbox.subscription",
        "SELECT * FROM outbox.partition_health",
    ],
    "consumer": [
        RECEIVE,
        "SELECT * FROM inbox.receipt",
        "INSERT INTO inbox.subscription (consumer, topic) VALUES ('a', 't')",
        "SELECT * FROM inbox.delivery",
        "UPDATE inbox.delivery SET acked_at = now()",
        GIVE_UP.format(schema="inbox"),
        "SELECT * FROM inbox.readable_dead_letter",
        "UPDATE inbox.dead_letter SET status = 'SUCCEEDED'",
    ],
    "maintainer": [
        "CALL outbox.maintain()",
        "SELECT * FROM outbox.partition_policy",
        "SELECT * FROM outbox.upkeep_plan()",
        "SELECT outbox.finish_detached('outbox.message')",
    ],
    "monitor": [
        "SELECT id, topic, key, attempts FROM outbox.message",
        "SELECT topic, error_reason, attempts FROM outbox.dead_letter",
        "SELECT * FROM outbox.partition_health",
        "SELECT count(*) FROM inbox.receipt",
        "SELECT * FROM outbox.upkeep_plan()",
        "SELECT * FROM outbox.retiring_partition",
        "SELECT * FROM partman.part_config",
        "SELECT last_error FROM outbox.message",
        "SELECT topic, error_reason, discarded_by FROM inbox.dead_letter",
    ],
}
FORBIDDEN = {
    "application": [
        "SELECT payload FROM outbox.message",
        "SELECT count(*) FROM outbox.message",
        "UPDATE outbox.message SET published_at = now()",
        "DELETE FROM outbox.message",
        "INSERT INTO outbox.message (id, lane, topic, content_type, payload,"
        " published_at) VALUES (outbox.uuid7(), 0, 't', 'c', '', now())",
        "SELECT * FROM outbox.dead_letter",
        "SELECT nextval('inbox.delivery_seq')",
        "CALL outbox.maintain()",
        "CREATE TABLE outbox.mine (id int)",
        "SELECT headers FROM outbox.message",
        "COPY outbox.message TO STDOUT",
        "INSERT INTO outbox.message (id, lane, topic, content_type, payload)"
        " VALUES (outbox.uuid7(), 0, 't', 'c', '') RETURNING payload",
        "TRUNCATE outbox.message",
        "SELECT setval('outbox.message_seq', 1)",
        "ALTER TABLE outbox.message DISABLE TRIGGER message_doorbell",
        "TABLE inbox.receipt",
        "TABLE inbox.delivery",
        "SELECT * FROM outbox.upkeep_plan()",
        "UPDATE outbox.partition_policy SET retention = '99 days'",
        "SET ROLE pillarbox_owner",
        "SET ROLE pillarbox_relay",
    ],
    "relay": [
        ADD,
        "INSERT INTO outbox.message (id, lane, topic, content_type, payload)"
        " VALUES (outbox.uuid7(), 0, 't', 'c', '')",
        "SELECT nextval('outbox.message_seq')",
        "UPDATE outbox.message SET topic = 'other'",
        "DELETE FROM outbox.dead_letter",
        "DELETE FROM inbox.delivery",
        "INSERT INTO inbox.subscription (consumer, topic) VALUES ('a', 't')",
        RECEIVE,
        "CALL outbox.maintain()",
        "SELECT outbox.make_partitions('outbox.message')",
        "UPDATE outbox.partition_policy SET unsettled = NULL",
        "TABLE partman.part_config",
        "SET ROLE pillarbox_owner",
        "UPDATE outbox.message SET payload = ''",
        "UPDATE outbox.message SET seq = 1",
        "DELETE FROM outbox.message",
        "TRUNCATE outbox.message",
        "UPDATE inbox.delivery SET acked_at = now()",
        "SELECT payload FROM inbox.delivery",
        "SELECT * FROM inbox.receipt",
    ],
    "consumer": [
        ADD,
        "SELECT * FROM outbox.message",
        "DELETE FROM inbox.receipt",
        "UPDATE inbox.receipt SET consumer = 'other'",
        DELIVER,
        "DELETE FROM inbox.delivery",
        "UPDATE inbox.delivery SET payload = ''",
        "UPDATE inbox.delivery SET consumer = 'mine'",
        "UPDATE outbox.message SET published_at = now()",
        "SELECT nextval('outbox.message_seq')",
        "SELECT * FROM outbox.dead_letter",
        GIVE_UP.format(schema="outbox"),
        "DELETE FROM inbox.dead_letter",
        "TRUNCATE inbox.receipt",
        "SELECT outbox.trim_foreign_receipts_batch()",
        "CALL outbox.maintain()",
        "SET ROLE pillarbox_owner",
    ],
    "maintainer": [
        ADD,
        "SELECT * FROM outbox.message",
        "DELETE FROM outbox.message",
        "UPDATE outbox.partition_policy SET retention = '1 day'",
        "SELECT outbox.adopt_table('outbox.message')",
        "DROP TABLE outbox.message",
        "SET ROLE pillarbox_detacher",
        "SET ROLE pillarbox_owner",
        "SELECT outbox.schedule_detaches()",
        "INSERT INTO outbox.retiring_partition SELECT 'inbox.message', 'outbox.x',"
        " now(), now()",
        "SELECT payload FROM inbox.delivery",
        "TABLE inbox.dead_letter",
        "DELETE FROM inbox.receipt",
        "DELETE FROM inbox.foreign_receipt",
        "UPDATE partman.part_config SET retention = '1 day'",
        "CREATE TABLE outbox.mine (id int)",
    ],
    "monitor": [
        "SELECT payload FROM outbox.message",
        "SELECT headers FROM outbox.message",
        "SELECT payload FROM outbox.dead_letter",
        "SELECT error_stacktrace FROM inbox.dead_letter",
        "SELECT payload_json FROM outbox.readable_dead_letter",
        "SELECT topic FROM inbox.readable_dead_letter",
        "UPDATE outbox.message SET published_at = now()",
        "UPDATE partman.part_config SET retention = '1 day'",
        "SELECT outbox.finish_detached('outbox.message')",
        ADD,
        "SELECT payload FROM inbox.delivery",
        "SELECT headers FROM inbox.dead_letter",
        "SELECT error_stacktrace FROM outbox.dead_letter",
        "UPDATE outbox.dead_letter SET status = 'DISCARDED'",
        "UPDATE inbox.delivery SET acked_at = now()",
        "UPDATE outbox.partition_policy SET retention = '99 days'",
        "DELETE FROM inbox.receipt",
        RECEIVE,
        DELIVER,
        GIVE_UP.format(schema="outbox"),
        "INSERT INTO inbox.subscription (consumer, topic) VALUES ('a', 't')",
        "CALL outbox.maintain()",
    ],
}
ON_A_PARTITION = [
    "SELECT FROM {partition}",
    "INSERT INTO {partition} DEFAULT VALUES",
    "UPDATE {partition} SET {control} = now()",
    "DELETE FROM {partition}",
    "TRUNCATE {partition}",
    "DROP TABLE {partition}",
    "ALTER TABLE {parent} DETACH PARTITION {partition}",
    "ALTER TABLE {partition} SET (fillfactor = 50)",
]


def pairs(table: dict[str, list[str]]) -> list[Any]:
    return [
        pytest.param(role, query, id=f"{role}: {' '.join(query.split())[:60]}")
        for role, queries in table.items()
        for query in queries
    ]


@pytest.fixture(scope="module")
def acting(server: PostgresServer, template_database: str) -> Iterator[As]:
    """One database for all: what one test leaves behind disturbs no other."""
    with new_database(server, "pillarbox_rights", template_database) as name:

        @contextmanager
        def act(role: str) -> Iterator[psycopg.Connection[Any]]:
            url = server.database_url(name)
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(f"SET SESSION AUTHORIZATION pillarbox_{role}")
                yield connection

        yield act


@pytest.mark.parametrize(("role", "query"), pairs(ALLOWED))
def test_a_role_may(acting: As, role: str, query: str) -> None:
    with acting(role) as connection:
        connection.execute(query)


@pytest.mark.parametrize(("role", "query"), pairs(FORBIDDEN))
def test_a_role_may_not(acting: As, role: str, query: str) -> None:
    with acting(role) as connection, pytest.raises(REFUSED):
        connection.execute(query)


@pytest.mark.parametrize("role", ALLOWED)
@pytest.mark.parametrize("query", ON_A_PARTITION)
def test_a_role_may_not_touch_a_partition_directly(
    acting: As, role: str, query: str
) -> None:
    with acting("owner") as owner:
        newest = owner.execute(
            "SELECT p.parent_table, p.control, max(x.partition::text) FROM"
            " outbox.partition_policy p, outbox.partitions(p.parent_table) x"
            " GROUP BY p.parent_table"
        ).fetchall()
    assert len(newest) == 6

    with acting(role) as connection:
        for parent, control, partition in newest:
            names = {"parent": parent, "control": control, "partition": partition}
            with pytest.raises(REFUSED):
                connection.execute(query.format(**names))


def test_no_partition_or_template_has_a_grant_of_any_kind(acting: As) -> None:
    with acting("owner") as owner:
        granted = owner.execute(
            "SELECT c.oid::regclass FROM pg_class c"
            " WHERE c.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)"
            " AND (c.relispartition OR c.relname LIKE '%_template')"
            " AND (c.relacl IS NOT NULL OR EXISTS (SELECT FROM pg_attribute a"
            "      WHERE a.attrelid = c.oid AND a.attacl IS NOT NULL))"
        ).fetchall()
    assert granted == []


def test_everybody_else_may_nothing(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE nobody_in_particular")
        try:
            connection.execute("SET SESSION AUTHORIZATION nobody_in_particular")
            for query in (ADD, "SELECT * FROM outbox.message", "TABLE inbox.receipt"):
                with pytest.raises(REFUSED):
                    connection.execute(query)
        finally:
            connection.execute("RESET SESSION AUTHORIZATION")
            connection.execute("DROP ROLE nobody_in_particular")


@pytest.mark.parametrize("count", [1, 3])
def test_the_application_adds_by_its_session(database_url: str, count: int) -> None:
    engine = create_engine(sqlalchemy_url(database_url))
    with Session(engine) as session, session.begin():
        session.execute(text("SET LOCAL ROLE pillarbox_application"))
        outbox.add(session, *[Message("t", b"", key="k") for _ in range(count)])
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL ROLE pillarbox_application"))
        connection.execute(outbox.insert_statement(Message("t", b"")))
    engine.dispose()

    with psycopg.connect(database_url) as owner:
        row = owner.execute("SELECT count(*) FROM outbox.message").fetchone()
    assert row == (count + 1,)
