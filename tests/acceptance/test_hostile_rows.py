"""Rows that a role with INSERT chooses: the relay stays small, and others go on."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psycopg
import pytest

from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays, as_role
from tests.fixtures.foreign_messages import DEEP
from tests.fixtures.limits import lift_limits
from tests.fixtures.waiting import wait_for

MIB = 1024 * 1024
MOST_MEMORY = 256 * MIB
MANY_HEADERS = "(SELECT jsonb_object_agg(m, '') FROM generate_series(1, 12000) m)"
ROW = {
    "id": "outbox.uuid7()",
    "lane": "16 + n % 16",
    "topic": "'hostile'",
    "content_type": "'text/plain'",
    "payload": "''",
}
# How many, and what is odd about them, as the application may insert it.
HOSTILE = (
    (60, {"headers": "jsonb_build_object('h', repeat('x', 250000))"}),
    (
        60,
        {"headers": MANY_HEADERS},
    ),
    (20, {"payload": "convert_to(repeat('x', 7000000), 'UTF8')"}),
    (20, {"payload": "convert_to(repeat('x', 60000000), 'UTF8')"}),
    (50, {"headers": f"'{{\"deep\": {DEEP}}}'"}),
    (50, {"headers": '\'{"a": 1, "b": null, "c": ["\\\\u0001"]}\''}),
    (50, {"headers": "'[]'"}),
    (50, {"id": "gen_random_uuid()"}),
    (50, {"content_type": "repeat(E'odd\\r\\n\\x01', 100)"}),
    (50, {"topic": "E' \\x01\\t'"}),
    (50, {"key": "repeat('k', 2048)", "tenant": "repeat(' ', 1024)"}),
    (50, {"available_at": "now() + interval '100 years'"}),
    (3000, {"lane": "20", "key": "'k' || n"}),
)
# What only the table's owner can insert, and who did before there were limits.
FROM_BEFORE = (
    (20, {"headers": "jsonb_build_object('h', repeat('x', 60000000))"}),
    (20, {"topic": "repeat('t', 1000000)"}),
    (20, {"key": "repeat('k', 1000000)"}),
    (20, {"content_type": "repeat('c', 1000000)"}),
    (20, {"topic": "''"}),
    (20, {"schema_version": "-1"}),
    (20, {"attempts": "2147483647"}),
)
NEIGHBOURS = 64
neighbours = ((NEIGHBOURS, {"topic": "'neighbour'", "key": "'neighbour ' || n"}),)
UNSETTLED = (
    "topic <> 'neighbour' AND available_at IS NULL"
    " AND published_at IS NULL AND dead_lettered_at IS NULL"
)


def insert(url: str, rows: tuple[tuple[int, dict[str, str]], ...]) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for count, odd in rows:
            row = ROW | odd
            connection.execute(
                f"INSERT INTO outbox.message ({', '.join(row)})"
                f" SELECT {', '.join(row.values())}"
                f" FROM generate_series(1, {count}) n".encode()
            )


def insert_large(url: str, count: int, size: int) -> None:
    """Insert payloads that no compression makes small."""
    with psycopg.connect(url, autocommit=True) as connection:
        for _ in range(count):
            connection.execute(
                "INSERT INTO outbox.message (id, lane, topic, content_type, payload)"
                " VALUES (outbox.uuid7(), 16, 'hostile', 'c', %b)",
                (os.urandom(size),),
            )


def peak_memory(pid: int) -> int:
    """Return the most that a process ever had in memory, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def arrived(inspection: Inspection) -> bool:
    ((count,),) = inspection.rows("SELECT count(*) FROM inbox.delivery")
    return bool(count == NEIGHBOURS)


def settled(inspection: Inspection) -> bool:
    return inspection.rows(
        f"SELECT NOT EXISTS (SELECT FROM outbox.message WHERE {UNSETTLED})"
    ) == [(True,)]


@pytest.fixture
def broker(database_url: str, inspection: Inspection) -> str:
    """PostgreSQL, which gets the messages of the neighbours and drops the others."""
    inspection.run("INSERT INTO inbox.subscription VALUES ('neighbour', 'neighbour')")
    return as_role(database_url, "pillarbox_relay") + "&unsubscribed=drop"


@pytest.mark.timeout(300)
def test_hostile_rows_of_every_kind_cost_little_memory_and_are_all_settled(
    broker: str,
    relays: Relays,
    inspection: Inspection,
    record_property: Callable[[str, object], None],
) -> None:
    url = inspection.url
    insert(as_role(url, "pillarbox_application"), (*HOSTILE, *neighbours))
    lift_limits(url)
    insert(url, FROM_BEFORE)

    relay = relays.start(broker, "--max-attempts=1")
    wait_for("the neighbours arrive", partial(arrived, inspection), seconds=200)
    wait_for("all is settled", partial(settled, inspection), seconds=200)

    # Nothing is lost: what is too large is whole in the dead letters.
    assert inspection.rows(
        "SELECT count(*) FROM outbox.dead_letter d JOIN outbox.message m"
        " ON m.id::text = d.message_id AND m.payload = d.payload"
        " AND m.headers <@ d.headers"
        " WHERE octet_length(m.payload) > 8 * 1024 * 1024"
    ) == [(20,)]
    memory = peak_memory(relay.pid)
    record_property("peak memory, MiB", round(memory / MIB))
    assert memory < MOST_MEMORY


@pytest.mark.timeout(300)
def test_who_comes_behind_large_rows_does_not_wait_until_they_are_moved(
    broker: str,
    relays: Relays,
    inspection: Inspection,
    record_property: Callable[[str, object], None],
) -> None:
    application = as_role(inspection.url, "pillarbox_application")
    insert_large(application, 8, 12 * MIB)
    insert(application, neighbours)

    relay = relays.start(broker)
    wait_for("the neighbours arrive", partial(arrived, inspection), seconds=200)
    wait_for("all is settled", partial(settled, inspection), seconds=200)

    # They had arrived before the last of the large ones was moved.
    assert inspection.rows(
        "SELECT (SELECT max(created_at) FROM inbox.delivery) < max(dead_lettered_at)"
        "  FROM outbox.message"
    ) == [(True,)]
    # Nothing is lost, and no schedule loads them: they are retried by hand.
    assert inspection.rows(
        "SELECT count(*) FROM outbox.dead_letter d JOIN outbox.message m"
        " ON m.id::text = d.message_id AND m.payload = d.payload"
        " WHERE d.retry_after IS NULL"
    ) == [(8,)]
    memory = peak_memory(relay.pid)
    record_property("peak memory, MiB", round(memory / MIB))
    assert memory < MOST_MEMORY // 2
