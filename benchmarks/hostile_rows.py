"""How long others wait while somebody inserts rows made to cost as much as they can."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import psycopg

from benchmarks.conditions import Conditions, show
from benchmarks.measure import Answer, at_most
from benchmarks.others import Waited, watch
from outbox.errors import OutboxError

LONGER_WAIT = 1.0
MOST_MIB = 256.0
LOOK = 0.2
LONGEST_LOOK = 900.0
MEGABYTE = 1_000_000
# In half of the lanes of its class; what others add goes into all of them.
ROW = {
    "id": "outbox.uuid7()",
    "lane": "16 + n % 8",
    "topic": "'hostile'",
    "content_type": "'text/plain'",
    "payload": "''",
}
DEEP = "[" * 12_000 + "]" * 12_000
MANY_HEADERS = "(SELECT jsonb_object_agg(m, '') FROM generate_series(1, 12000) m)"
# What whoever has INSERT may put there. With `size`: a large value, in megabytes.
ROWS: tuple[tuple[int, Mapping[str, str]], ...] = (
    (60, {"headers": "jsonb_build_object('h', repeat('x', 250000))"}),
    (60, {"headers": MANY_HEADERS}),
    (50, {"headers": f"'{{\"deep\": {DEEP}}}'"}),
    (50, {"headers": '\'{"a": 1, "b": null, "c": ["\\\\u0001"]}\''}),
    (50, {"headers": "'[]'"}),
    (50, {"id": "gen_random_uuid()"}),
    (50, {"content_type": "repeat(E'odd\\r\\n\\x01', 100)"}),
    (50, {"topic": "E' \\x01\\t'"}),
    (50, {"key": "repeat('k', 2048)", "tenant": "repeat(' ', 1024)"}),
    (50, {"available_at": "now() + interval '100 years'"}),
    (3000, {"key": "'k' || n"}),
    (20, {"payload": "convert_to(repeat('x', 7000000), 'UTF8')"}),
    (40, {"payload": "convert_to(repeat('x', {size}000000), 'UTF8')"}),
)
# What only the table's owner can insert, and anybody could before there were limits.
ROWS_FROM_BEFORE: tuple[tuple[int, Mapping[str, str]], ...] = (
    (20, {"topic": "repeat('t', 1000000)"}),
    (20, {"key": "repeat('k', 1000000)"}),
    (20, {"content_type": "repeat('c', 1000000)"}),
    (20, {"schema_version": "-1"}),
    (20, {"attempts": "2147483647"}),
    (40, {"headers": "jsonb_build_object('h', repeat('x', {size}000000))"}),
)
INCOMPRESSIBLE = 12
LIFT_LIMITS = """
DO $$
DECLARE
    v_name text;
BEGIN
    FOR v_name IN
        SELECT conname FROM pg_constraint
         WHERE conrelid = 'outbox.message'::regclass
           AND (conname LIKE '%size' OR conname = 'schema_version_positive')
    LOOP
        EXECUTE format('ALTER TABLE outbox.message DROP CONSTRAINT %I', v_name);
    END LOOP;
END
$$
"""
UNSETTLED = """
SELECT EXISTS (
    SELECT FROM outbox.message
     WHERE topic <> 'other' AND available_at IS NULL
       AND published_at IS NULL AND dead_lettered_at IS NULL
)
"""


def answers(conditions: Conditions) -> Iterator[Answer]:
    size = conditions.size(60, quick=12)
    seconds = conditions.size(60, quick=10)
    without = look("no hostile rows", conditions, seconds)
    hostile = look(
        "hostile rows", conditions, seconds, partial(insert_all, megabytes=size)
    )
    large = look("large rows", conditions, seconds, partial(insert_large, size))
    yield Answer(
        question="longest wait beside no hostile rows",
        figure=without.longest,
        unit=" s",
        detail=described(without),
    )
    for label, found in (
        (f"hostile rows, up to {size} MB", hostile),
        (f"{INCOMPRESSIBLE} incompressible payloads of {size} MB", large),
    ):
        yield Answer(
            question=f"longest wait in other lanes than {label}, less that",
            figure=max(0.0, found.longest_elsewhere - without.longest),
            unit=" s",
            target=at_most(LONGER_WAIT),
            detail=described(found),
        )
        yield Answer(
            question="longest wait in their lanes, less that",
            figure=max(0.0, found.longest - without.longest),
            unit=" s",
            detail="behind rows that come first: lanes are in order",
        )
        yield Answer(
            question=f"memory of that relay ({label})",
            figure=found.peak_mib,
            unit=" MiB",
            target=at_most(MOST_MIB),
            detail="resident memory at its highest",
        )


def look(
    label: str,
    conditions: Conditions,
    seconds: float,
    insert: Callable[[str], None] | None = None,
) -> Waited:
    """Watch others' messages while rows are inserted, and until these are settled."""
    with conditions.migrated_database() as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(LIFT_LIMITS)

        def meanwhile() -> None:
            if insert is not None:
                insert(url)
                wait_until_settled(url)

        found = watch(url, seconds, meanwhile)
    show(label, found.longest, "s")
    return found


def described(found: Waited) -> str:
    return (
        f"{found.messages:,} messages of others in all lanes: longest "
        f"{found.longest:.3f} s, 99 % within {found.late:.3f} s, half within "
        f"{found.middle:.3f} s; in half of the lanes {found.longest_elsewhere:.3f} s"
    )


def insert_all(url: str, megabytes: int) -> None:
    """Insert each kind in one transaction, so that its rows are there all at once."""
    with psycopg.connect(url, autocommit=True) as connection:
        for count, odd in (*ROWS, *ROWS_FROM_BEFORE):
            row = {**ROW, **odd}
            values = ", ".join(row.values()).replace("{size}", str(megabytes))
            connection.execute(
                f"INSERT INTO outbox.message ({', '.join(row)})"
                f" SELECT {values} FROM generate_series(1, {count}) n".encode()
            )


def insert_large(megabytes: int, url: str) -> None:
    """Insert payloads that no compression makes small, in one transaction."""
    with psycopg.connect(url) as connection:
        for number in range(INCOMPRESSIBLE):
            connection.execute(
                "INSERT INTO outbox.message (id, lane, topic, content_type, payload)"
                " VALUES (outbox.uuid7(), 16 + %s %% 8, 'hostile', 'c', %b)",
                (number, os.urandom(megabytes * MEGABYTE)),
            )


def wait_until_settled(url: str) -> None:
    end = time.monotonic() + LONGEST_LOOK
    with psycopg.connect(url, autocommit=True) as connection:
        while connection.execute(UNSETTLED).fetchone() == (True,):
            if time.monotonic() > end:
                raise OutboxError(f"rows are unsettled after {LONGEST_LOOK:.0f} s")
            time.sleep(LOOK)
