"""Whether the drain keeps its pace while another session pins a snapshot.

Meanwhile no dead row can be removed, so a scan from the start of an index passes over
everything settled before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import psycopg

from benchmarks.conditions import Conditions, show
from benchmarks.drain import drain
from benchmarks.fill import fill
from benchmarks.measure import (
    Answer,
    Series,
    Variant,
    at_least,
    measure,
    noise,
    quantity,
)
from benchmarks.workload import Workload


def answers(conditions: Conditions) -> Iterator[Answer]:
    workload = Workload(messages=conditions.size(1_000_000, quick=200_000))
    drains: list[Sequence[float]] = []

    def run() -> float:
        with conditions.migrated_database() as url:
            fill(url, workload)
            with pinned_snapshot(url):
                parts = drain(url, workload.messages).parts
        drains.append(parts)
        return parts[-1] / parts[0]

    variant = Variant(label="last tenth to first", run=run)
    found = measure(variant, runs=conditions.runs(2), on_run=on_run)
    detail = f"each tenth, medians of {len(drains)} drains: {rates(drains)}"
    yield Answer(
        question=f"pinned snapshot, {workload.messages:,} messages: {variant.label}",
        figure=found.median,
        target=at_least(0.9),
        noise=found.noise,
        detail=detail,
    )
    slowest = [min(parts) / parts[0] for parts in drains]
    yield Answer(
        question=f"pinned snapshot, {workload.messages:,} messages: slowest to first",
        figure=median(slowest),
        noise=noise(
            Series(label="slowest", figures=tuple(slowest[0::2])),
            Series(label="slowest (again)", figures=tuple(slowest[1::2])),
        ),
        detail=detail,
    )


@contextmanager
def pinned_snapshot(database_url: str) -> Iterator[None]:
    """Hold a snapshot open in another session, as a long report does."""
    with psycopg.connect(database_url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT count(*) FROM outbox.message")
        yield
        connection.rollback()


def rates(drains: Sequence[Sequence[float]]) -> str:
    tenths = (median(figures) for figures in zip(*drains, strict=True))
    return ", ".join(quantity(tenth, "") for tenth in tenths) + " /s"


def on_run(label: str, figure: float) -> None:
    show(label, figure, "x")
