"""How long writers wait while a day of five million rows is dropped under load.

Nobody else's transaction is open: what is left is what the size itself costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.conditions import Conditions
from benchmarks.measure import Answer, Variant, at_most
from benchmarks.retention_stall import LONGEST_STALL, compare, without_ours
from benchmarks.stall import (
    WRITERS,
    OurDrop,
    Upkeep,
    longest_insert,
    no_drop,
    partman_drop,
    prepare,
)


def answers(conditions: Conditions) -> Iterator[Answer]:
    rows = conditions.size(5_000_000, quick=50_000)
    seconds = conditions.size(45, quick=10)
    ours = OurDrop()
    with conditions.migrated_database() as full:
        prepare(full, days=1, rows=rows)

        def longest_stall(upkeep: Upkeep) -> Callable[[], float]:
            def run() -> float:
                with conditions.copied_database(full) as url:
                    return longest_insert(url, upkeep, seconds=seconds, reader=False)

            return run

        found = compare(
            Variant(label="ours", run=longest_stall(ours)),
            Variant(label="pg_partman's drop", run=longest_stall(partman_drop)),
            Variant(label="no drop", run=longest_stall(no_drop)),
        )
    under_load = f"drop of {rows:,} rows under load: longest insert"
    yield Answer(
        question=under_load,
        figure=max(*found.subject.figures, *found.again.figures),
        unit="ms",
        target=at_most(LONGEST_STALL),
        noise=found.noise,
        detail=f"{WRITERS} writers, one day missing ahead: {found.medians('ms')}; "
        f"{ours}",
    )
    yield from without_ours(found, under_load)
