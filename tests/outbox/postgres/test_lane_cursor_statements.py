"""The statements tell the lane cursor which transactions are open."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psycopg
import pytest

from outbox import Message
from outbox.postgres.connection import connect, conninfo
from outbox.postgres.lane_cursor import Snapshot
from outbox.postgres.sql_files import load
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute

DAY: Final = timedelta(days=1)
DELIVERY: Final = """
    INSERT INTO inbox.delivery
           (consumer, message_id, lane, topic, content_type, schema_version,
            headers, payload)
    VALUES ('c', outbox.uuid7(), 0, 'orders', 'text/plain', 1, '{}', '')
"""


def parameters() -> dict[str, Any]:
    now = datetime.now(UTC)
    return {
        "consumer": "c",
        "lanes": list(range(48)),
        "floors": [-1] * 48,
        "aboves": [-1] * 48,
        "up_tos": [10**9] * 48,
        "lane": 0,
        "above": -1,
        "up_to": 10**9,
        "max_open": 1,
        "starts_at": now - DAY,
        "ends_at": now + DAY,
        "passed": [],
        "aside": [],
        "oldest": now - DAY,
        "newest": now + DAY,
        "max_rows": 10,
        "max_bytes": 1_000_000,
        "max_indexed": 1000,
        "max_tenant": 1000,
        "max_content_type": 1000,
        "max_headers": 1000,
        "max_payload": 1000,
        "max_copied": 1000,
    }


@contextmanager
def open_writer(url: str) -> Iterator[int]:
    """Keep a transaction open and yield its id."""
    with psycopg.connect(conninfo(url)) as writer:
        row = writer.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
        assert row is not None
        yield row[0]


@pytest.mark.parametrize("in_transaction", [False, True])
@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("relay", "claim_batch"),
        ("relay", "find_unmarked"),
        ("inbox", "claim_deliveries"),
        ("inbox", "verify_stretch"),
    ],
)
async def test_a_look_reads_an_xid_above_all_open_ones_without_assigning_one(
    package: str, name: str, in_transaction: bool, database_url: str
) -> None:
    insert(database_url, Message("orders", b""))
    execute(database_url, DELIVERY)
    async with await connect(database_url, application_name="test") as connection:
        # The second writer's xid is above all that have ended: xmax doesn't cover it.
        with open_writer(database_url) as first, open_writer(database_url) as last:
            if in_transaction:
                await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
                # Transactions that begin after the snapshot can be counted, too.
                await connection.execute("SELECT")
            cursor = await connection.execute(load(package, name), parameters())
            row = await cursor.fetchone()
            assert row is not None
            snapshot = Snapshot.read(row[-1])
            cursor = await connection.execute("SELECT pg_current_xact_id_if_assigned()")

            assert snapshot.xmin <= first
            assert snapshot.next_xid > last
            assert await cursor.fetchone() == (None,)
