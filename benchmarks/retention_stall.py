"""How long writers wait while partitions are dropped and a transaction is open.

A session that is idle in a transaction has read the table. pg_partman's own drop asks
for an exclusive lock on it, and every writer queues behind that request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.conditions import Conditions, show
from benchmarks.measure import Answer, Variant, at_most, measure
from benchmarks.stall import (
    Upkeep,
    longest_insert,
    no_drop,
    our_drop,
    partman_drop,
    prepare,
)
from benchmarks.stalled_writers import WRITERS

EXPIRED_DAYS = 3
ROWS = 1_000
LONGEST_STALL = 50
BESIDE = {
    "no drop": "what is left of the machine's own: a figure near it has no other cause",
    "pg_partman's drop": "drop_partition_time(), which makes no day ahead",
}


def answers(conditions: Conditions) -> Iterator[Answer]:
    idle = conditions.size(60, quick=10)
    yield from in_three_ways(
        f"retention: longest insert beside a reader idle for {idle} s",
        lambda upkeep: longest_stall(conditions, upkeep, idle),
        expired=f", {EXPIRED_DAYS} expired",
    )


def in_three_ways(
    question: str,
    longest_stall: Callable[[Upkeep], Callable[[], float]],
    expired: str = "",
) -> list[Answer]:
    """Run pillarbox's drop, pg_partman's, none, and pillarbox's again, once each."""
    found = measure(
        Variant(label="ours", run=longest_stall(our_drop)),
        Variant(label="pg_partman's drop", run=longest_stall(partman_drop)),
        Variant(label="no drop", run=longest_stall(no_drop)),
        runs=1,
        on_run=lambda label, figure: show(label, figure, "ms"),
    )
    answer = Answer(
        question=question,
        figure=max(*found.subject.figures, *found.again.figures),
        unit="ms",
        target=at_most(LONGEST_STALL),
        noise=found.noise,
        detail=f"{WRITERS} writers, one day missing ahead{expired}: "
        f"{found.medians('ms')}",
    )
    comparisons = [
        Answer(
            question=f"{question}, {label}",
            figure=found.other(label).median,
            unit="ms",
            detail=detail,
        )
        for label, detail in BESIDE.items()
    ]
    return [answer, *comparisons]


def longest_stall(
    conditions: Conditions, upkeep: Upkeep, idle: int
) -> Callable[[], float]:
    def run() -> float:
        with conditions.migrated_database() as url:
            prepare(url, days=EXPIRED_DAYS, rows=ROWS)
            return longest_insert(url, upkeep, seconds=idle, reader=True)

    return run
