"""Whether the outbox drains as fast with 90 daily partitions as with 8."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
from psycopg import sql

from benchmarks.conditions import Conditions, show
from benchmarks.drain import drain
from benchmarks.fill import fill
from benchmarks.history import days_of, fill_messages, make_days
from benchmarks.measure import Answer, Variant, at_least, measure
from benchmarks.workload import Workload

SETTLED_A_DAY = 1_000
# From noon on, pg_partman has created an eighth day ahead.
OTHER_DAYS = """
SELECT partition::text FROM outbox.partitions(%s)
 WHERE ends_at <= now() OR starts_at > now() + interval '7 days'
"""
FOLLOWERS = """
SELECT parent_table FROM outbox.partition_policy WHERE follows = 'outbox.message'
"""


def answers(conditions: Conditions) -> Iterator[Answer]:
    workload = Workload(messages=conditions.size(500_000, quick=50_000))
    many, few = (
        Variant(label=f"{count} partitions", run=rate(conditions, workload, count))
        for count in (90, 8)
    )
    found = measure(many, few, runs=conditions.runs(5), on_run=on_run)
    yield Answer(
        question=f"partitions: {many.label} against {few.label}",
        figure=found.ratio(few.label),
        target=at_least(0.9),
        noise=found.noise,
        detail=f"{workload.messages:,} messages of today: {found.medians('/s')}",
    )


def rate(
    conditions: Conditions, workload: Workload, partitions: int
) -> Callable[[], float]:
    def run() -> float:
        with conditions.migrated_database() as url:
            with psycopg.connect(url, autocommit=True) as connection:
                set_partitions(connection, partitions)
            fill(url, workload)
            return drain(url, workload.messages).rate

    return run


def set_partitions(connection: psycopg.Connection, wanted: int) -> None:
    """Keep today and 7 days ahead; create settled past days, `wanted` days in all."""
    connection.execute("SET timezone = 'UTC'")
    followers = [parent for (parent,) in connection.execute(FOLLOWERS)]
    for parent in ("outbox.message", *followers):
        for (other,) in connection.execute(OTHER_DAYS, (parent,)).fetchall():
            connection.execute(sql.SQL("DROP TABLE {}").format(sql.SQL(other)))
    if days := wanted - count_partitions(connection):
        make_days(connection, "outbox.message", newest=1, oldest=days)
        _, *before = days_of(connection, "outbox.message")
        for day in reversed(before):
            fill_messages(connection, day, SETTLED_A_DAY)
    made = count_partitions(connection)
    assert made == wanted, f"{made} partitions instead of {wanted}"


def count_partitions(connection: psycopg.Connection) -> int:
    found = connection.execute(
        "SELECT count(*) FROM outbox.partitions('outbox.message')"
    ).fetchone()
    assert found is not None
    return int(found[0])


def on_run(label: str, figure: float) -> None:
    show(label, figure, "/s")
