"""How long writers wait while a partition of five million rows is dropped under load.

No other transaction is open, so this is the cost of the partition's size alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.conditions import Conditions
from benchmarks.measure import Answer
from benchmarks.retention_stall import in_three_ways
from benchmarks.stall import Upkeep, longest_insert, prepare


def answers(conditions: Conditions) -> Iterator[Answer]:
    rows = conditions.size(5_000_000, quick=50_000)
    seconds = conditions.size(45, quick=10)
    with conditions.migrated_database() as full:
        prepare(full, days=1, rows=rows)

        def longest_stall(upkeep: Upkeep) -> Callable[[], float]:
            def run() -> float:
                with conditions.copied_database(full) as url:
                    return longest_insert(url, upkeep, seconds=seconds, reader=False)

            return run

        yield from in_three_ways(
            f"drop of {rows:,} rows under load: longest insert", longest_stall
        )
