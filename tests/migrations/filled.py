"""Adds rows to all of pillarbox's tables, and reads the contents of a database."""

from typing import Any, Final, TypeAlias

import psycopg
from psycopg import sql

from tests.fixtures.postgres import ADD_MAIN

Contents: TypeAlias = dict[str, list[tuple[Any, ...]]]

_DEAD_LETTER: Final = (
    "INSERT INTO {} (origin, message_id, topic, key, attempts, schema_version,"
    " content_type, headers, payload, error_reason) VALUES ('relay', 'm1', 'orders',"
    " 'a', 8, 1, 'text/plain', '{{\"h\": \"ü\"}}', '\\x00ff', 'refused')"
)
_BEAT: Final = (
    "SELECT {}.beat(gen_random_uuid(), '{}', 'main', 'host 1', 'redis://h/0', now(),"
    " 'why', 1, 2, false)"
)
_ROWS: Final = (
    "SELECT outbox.add('orders', convert_to(n::text, 'UTF8'), 'a', 'acme',"
    " '{\"h\": \"ü\"}', priority => 'bulk') FROM generate_series(1, 3) n",
    "SELECT outbox.add('orders', '\\x00ff'::bytea, available_at => now() + '1 day')",
    "INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages, lane,"
    " reader, snapshot)"
    " SELECT date_trunc('day', now(), 'UTC'), now() + '1 day',"
    " coalesce((SELECT max(number) FROM outbox.position), 0) + 1, max(seq), count(*),"
    " lane, 'main', pg_current_snapshot()"
    " FROM outbox.message WHERE key IS NOT NULL GROUP BY lane",
    "INSERT INTO outbox.deferral (created_at, due_at, seq, id, lane, cause)"
    " SELECT created_at, available_at, seq, id, lane, 'scheduled'"
    " FROM outbox.message WHERE available_at IS NOT NULL",
    ADD_MAIN,
    "UPDATE outbox.reader SET broker = 'redis://h/0'",
    _BEAT.format("outbox", "relay"),
    _BEAT.format("inbox", "consumer"),
    _DEAD_LETTER.format("outbox.dead_letter"),
    _DEAD_LETTER.format("inbox.dead_letter"),
    "INSERT INTO inbox.receipt (message_id, message_at, consumer)"
    " SELECT id, inbox.moment_of(id), 'billing' FROM outbox.uuid7() id",
    "INSERT INTO inbox.job (message_id, message_at, consumer, lease, checkpoint)"
    " SELECT id, inbox.moment_of(id), 'reports', 7, '{\"page\": 3}'"
    " FROM outbox.uuid7() id",
    "INSERT INTO inbox.suspect (message_id, message_at, consumer, starts)"
    " SELECT id, inbox.moment_of(id), 'billing', 2 FROM outbox.uuid7() id",
    "INSERT INTO inbox.foreign_receipt VALUES ('stripe', outbox.uuid7(), 'billing')",
    "INSERT INTO outbox.operation (kind, selection, reason, asked_by, expected)"
    " VALUES ('discard', '{\"topic\": \"orders\"}', 'why', 'ann', 3)",
    "INSERT INTO outbox.dropped_partition (parent_table, starts_at, ends_at)"
    " VALUES ('outbox.message', '2001-01-01Z', '2001-01-02Z') ON CONFLICT DO NOTHING",
    "INSERT INTO outbox.upkeep_failure (step, object, failure)"
    " VALUES ('drop', 'outbox.message_p20010101', 'in use') ON CONFLICT DO NOTHING",
    "INSERT INTO outbox.retiring_partition (partition, parent_table, starts_at,"
    " ends_at, detach_by) SELECT partition, 'outbox.message', starts_at, ends_at,"
    " 'pg_cron' FROM outbox.partitions('outbox.message') ORDER BY starts_at LIMIT 1"
    " ON CONFLICT DO NOTHING",
    "INSERT INTO outbox.kept_partition (partition, parent_table, starts_at, ends_at)"
    " VALUES ('outbox.message_moved', 'outbox.message', '2001-01-01Z', '2001-01-02Z')"
    " ON CONFLICT DO NOTHING",
)
# Partitions are read through their tables; templates never have rows.
_TABLES: Final = """
    SELECT n.nspname, c.relname, c.relkind = 'S'
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname IN ('outbox', 'inbox') AND c.relkind IN ('r', 'p', 'S')
       AND NOT c.relispartition AND c.relname NOT LIKE '%_template'
"""


def fill(url: str) -> None:
    """Add a row to each table that the application, relay, consumer or upkeep fills."""
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in _ROWS:
            connection.execute(statement.encode())


def contents(url: str) -> Contents:
    """Return all rows of each table, and the state of each sequence."""
    found = {}
    with psycopg.connect(url, autocommit=True) as connection:
        for schema, name, is_sequence in connection.execute(_TABLES).fetchall():
            columns = sql.SQL("last_value, is_called" if is_sequence else "*")
            table = sql.Identifier(schema, name)
            query = sql.SQL("SELECT {} FROM {}").format(columns, table)
            rows = connection.execute(query).fetchall()
            found[f"{schema}.{name}"] = sorted(rows, key=repr)
    return found


def empty_tables(found: Contents) -> list[str]:
    """Return the names of the empty tables."""
    return sorted(table for table, rows in found.items() if not rows)
