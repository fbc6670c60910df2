"""Fill the outbox by COPY, for runs that measure only the drain."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import psycopg
from psycopg.types.json import Jsonb

from benchmarks.workload import TOPIC, Workload
from pillarbox.outbox.lane import Priority, lane_of
from pillarbox.outbox.message_id import uuid7
from pillarbox.outbox.payload.json_codec import JSON

COPY = (
    "COPY outbox.message (id, lane, topic, key, content_type, headers, payload)"
    " FROM STDIN (FORMAT BINARY)"
)
NO_HEADERS = Jsonb({})
TYPES = ("uuid", "int2", "text", "text", "text", "jsonb", "bytea")


def fill(
    database_url: str,
    workload: Workload,
    headers: Callable[[int], Mapping[str, str]] | None = None,
) -> None:
    """Add all messages of a workload in its order, and vacuum as autovacuum would.

    `headers` returns the headers for a message number; if it is None, messages have no
    headers.
    """
    lanes: dict[str, int] = {}
    with psycopg.connect(database_url, autocommit=True) as connection:
        with connection.cursor() as cursor, cursor.copy(COPY) as copy:
            copy.set_types(TYPES)
            for number, (key, payload) in enumerate(workload):
                id = uuid7()
                if (lane := lanes.get(key)) is None:
                    lane = lanes[key] = lane_of(key, id, Priority.DEFAULT)
                own = NO_HEADERS if headers is None else Jsonb(dict(headers(number)))
                copy.write_row((id, lane, TOPIC, key, JSON, own, payload))
        connection.execute("VACUUM ANALYZE outbox.message")


def unpublished(database_url: str) -> int:
    """Count the messages that still wait or were dead-lettered."""
    with psycopg.connect(database_url) as connection:
        row = connection.execute(
            "SELECT (SELECT count(*) FROM outbox.message)"
            " - (SELECT coalesce(sum(messages - deferred), 0) FROM outbox.position)"
        ).fetchone()
    assert row is not None
    return int(row[0])
