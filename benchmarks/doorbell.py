"""What the doorbell costs writers, and how soon it wakes the relay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median, quantiles
from uuid import UUID

import psycopg

from benchmarks import pgbench
from benchmarks.arrivals import arrivals
from benchmarks.conditions import Conditions, show
from benchmarks.measure import Answer, Series, Variant, at_most, measure, noise
from benchmarks.workload import TOPIC, payload
from pillarbox.outbox.lane import Priority, lane_of
from pillarbox.outbox.message_id import uuid7

CLIENTS = 16
COST = 1.05
WITHOUT_DOORBELL = "DROP TRIGGER message_doorbell ON outbox.message"

MESSAGES_A_SECOND = 200
WARM_UP = 50
INSERT = """
INSERT INTO outbox.message (id, lane, topic, key, content_type, payload)
VALUES (%s, %s, %s, %s, 'application/json', %s)
"""


def answers(conditions: Conditions) -> Iterator[Answer]:
    yield writers(conditions)
    yield from latency(conditions)


def writers(conditions: Conditions) -> Answer:
    """Compare the throughput of many writers while no relay runs."""
    without = Variant(label="without", run=rate(conditions, WITHOUT_DOORBELL))
    ringing = Variant(label="with", run=rate(conditions))
    found = measure(
        without,
        ringing,
        runs=conditions.runs(9),
        on_run=lambda label, figure: show(label, figure, "/s"),
    )
    return Answer(
        question=f"doorbell: {CLIENTS} writers without it against with it",
        figure=found.ratio(ringing.label),
        target=at_most(COST * found.noise),
        noise=found.noise,
        detail=f"transactions {found.medians('/s')}",
    )


def rate(conditions: Conditions, *statements: str) -> Callable[[], float]:
    def run() -> float:
        with conditions.migrated_database() as url:
            with psycopg.connect(url) as connection:
                for statement in (pgbench.TABLE, *statements):
                    connection.execute(statement)
            seconds = conditions.size(3, quick=2)
            return pgbench.transactions_a_second(url, clients=CLIENTS, seconds=seconds)

    return run


def latency(conditions: Conditions) -> Iterator[Answer]:
    """Measure from commit to publisher, with a relay that sleeps between messages."""
    messages = conditions.size(2_000, quick=400)

    def waits() -> Sequence[float]:
        with conditions.migrated_database() as url:
            return milliseconds(url, messages)

    yield from answers_of_waits(
        conditions, "doorbell: commit to claim when idle", waits, {50: 5, 99: 30}
    )


def answers_of_waits(
    conditions: Conditions,
    question: str,
    waits: Callable[[], Sequence[float]],
    bounds: Mapping[int, float | None],
    a_second: int = MESSAGES_A_SECOND,
) -> Iterator[Answer]:
    """Measure how long messages take, in milliseconds.

    `waits` returns the times of one run, and `bounds` has a target, or None, for each
    percentile asked for.
    """
    taken: list[Sequence[float]] = []

    def run() -> float:
        taken.append(waits())
        return median(taken[-1])

    measure(
        Variant(label=question, run=run),
        runs=conditions.runs(3),
        on_run=lambda label, figure: show(label, figure, "ms (median)"),
    )
    for percent, bound in bounds.items():
        figures = [quantiles(each, n=100)[percent - 1] for each in taken]
        first = Series(label=question, figures=tuple(figures[0::2]))
        again = Series(label=question, figures=tuple(figures[1::2]))
        name = "median" if percent == 50 else f"{percent}th percentile"
        yield Answer(
            question=f"{question}, {name}",
            figure=median(figures),
            unit="ms",
            target=None if bound is None else at_most(bound),
            noise=noise(first, again),
            detail=f"{len(taken[-1]):,} transactions, {a_second} a second",
        )


def milliseconds(database_url: str, messages: int) -> list[float]:
    """Return how long each message took, except those of the warm-up."""
    with arrivals(database_url, WARM_UP + messages) as arriving:
        committed = write(database_url, WARM_UP + messages)
        claimed = arriving.wait()
    measured = list(committed.items())[WARM_UP:]
    return [(claimed[id] - moment) / 1_000_000 for id, moment in measured]


def write(
    database_url: str, messages: int, a_second: int = MESSAGES_A_SECOND
) -> dict[UUID, int]:
    """Commit one message at a time, evenly spaced; return when each commit began."""
    committed = {}
    with psycopg.connect(database_url) as connection:
        started = time.monotonic()
        for number in range(messages):
            due = started + number / a_second
            time.sleep(max(0.0, due - time.monotonic()))
            id, key = uuid7(), f"order-{number}"
            lane = lane_of(key, id, Priority.DEFAULT)
            connection.execute(INSERT, (id, lane, TOPIC, key, payload(number, 300)))
            committed[id] = time.monotonic_ns()
            connection.commit()
    return committed
