"""How long other tenants wait while someone inserts rows designed to be expensive."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import psycopg

from benchmarks.conditions import Conditions, show
from benchmarks.measure import Answer, at_most
from benchmarks.others import Waited, watch
from pillarbox.outbox.errors import OutboxError
from tests.fixtures.hostile_rows import (
    ROWS,
    insert_charged,
    insert_incompressible,
    insert_rows,
)

LONGER_WAIT = 1.0
MOST_MIB = 256.0
LOOK = 0.2
LONGEST_LOOK = 900.0
MEGABYTE = 1_000_000
# Of the 16 lanes of the class, all of which receive the other tenants' messages.
LANES = 8
INCOMPRESSIBLE = 12
UNSETTLED = """
SELECT EXISTS (
    SELECT FROM outbox.message_status
     WHERE topic <> 'other'
       AND state NOT IN ('published', 'dead_lettered', 'scheduled')
)
"""


def answers(conditions: Conditions) -> Iterator[Answer]:
    size = conditions.size(60, quick=12)
    seconds = conditions.size(60, quick=10)
    without = look("no hostile rows", conditions, seconds)
    hostile = look(
        "hostile rows",
        conditions,
        seconds,
        partial(insert_hostile, size),
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
    """Watch others' messages until `insert` has run and its rows are settled."""
    with conditions.migrated_database() as url:

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


def insert_hostile(megabytes: int, url: str) -> None:
    insert_rows(url, ROWS, lanes=LANES, megabytes=megabytes)
    insert_charged(url)


def insert_large(megabytes: int, url: str) -> None:
    insert_incompressible(url, INCOMPRESSIBLE, megabytes * MEGABYTE, lanes=LANES)


def wait_until_settled(url: str) -> None:
    end = time.monotonic() + LONGEST_LOOK
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET jit = off")
        while connection.execute(UNSETTLED).fetchone() == (True,):
            if time.monotonic() > end:
                raise OutboxError(f"rows are unsettled after {LONGEST_LOOK:.0f} s")
            time.sleep(LOOK)
