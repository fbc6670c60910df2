"""How soon a relay publishes after taking over lanes with millions of settled messages.

A relay drains them and is then either stopped, so that it settles what it published, or
killed. Then one message is added to each lane, and another relay starts. The
same day shows how long the gate takes, which the upkeep checks before it drops a day.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg

from benchmarks.conditions import Conditions, show
from benchmarks.drain import NOWHERE, drain, draining
from benchmarks.fill import unpublished
from benchmarks.history import Day, days_of, fill_messages
from benchmarks.measure import Answer, Variant, at_most, measure

LANES = 16
MORE = 1_000_000
"""Added to the number of messages, so that the relay doesn't stop on its own."""
PAYLOAD_BYTES = 300
ADD = """
INSERT INTO outbox.message (id, lane, topic, content_type, payload)
SELECT outbox.uuid7(), 16 + number, 'taken over', 'text/plain', ''
  FROM generate_series(0, %s) AS number
"""
DAY = """
SELECT partition, starts_at, ends_at FROM outbox.partitions('outbox.message')
 WHERE starts_at <= now() AND now() < ends_at
"""
GATE = "SELECT count(*) FROM outbox.unsettled_messages(%s::regclass, %s, %s)"


def answers(conditions: Conditions) -> Iterator[Answer]:
    messages = conditions.size(5_000_000, quick=200_000)
    name = f"{messages:,} messages settled"
    for ending, settle in (("killed", settle_and_kill), ("stopped", settle_and_stop)):
        with settled(conditions, messages, settle) as url:
            if ending == "stopped":
                yield ask(f"gate of a day with {name}", gate(url, messages), conditions)
            yield ask(
                f"takeover, {name}, relay {ending}: first message",
                takeover(url),
                conditions,
            )


def ask(question: str, run: Callable[[], float], conditions: Conditions) -> Answer:
    found = measure(
        Variant(label=question, run=run),
        runs=conditions.runs(),
        on_run=lambda label, figure: show(label, figure, "ms"),
    )
    return Answer(
        question=question,
        # Later runs find the positions of the earlier ones.
        figure=max(*found.subject.figures, *found.again.figures),
        unit="ms",
        target=at_most(1_000),
        noise=found.noise,
        detail=f"the slowest; median {found.median:,.0f} ms",
    )


@contextmanager
def settled(
    conditions: Conditions, messages: int, settle: Callable[[str, int], None]
) -> Iterator[str]:
    """Yield a database in which this many messages of today were published."""
    with conditions.migrated_database() as url:
        with psycopg.connect(url, autocommit=True) as connection:
            today: Day = days_of(connection, "outbox.message")[0]
            fill_messages(
                connection, today, messages, settled=False, payload_bytes=PAYLOAD_BYTES
            )
            connection.execute("VACUUM ANALYZE outbox.message")
        settle(url, messages)
        yield url


def settle_and_stop(url: str, messages: int) -> None:
    """Let a relay publish everything and stop."""
    drain(url, messages)


def settle_and_kill(url: str, messages: int) -> None:
    """Let a relay publish everything, and kill it."""
    with draining(url, messages + MORE, NOWHERE):
        while unpublished(url):
            time.sleep(1)


def takeover(url: str) -> Callable[[], float]:
    def run() -> float:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(ADD, (LANES - 1,))
        return drain(url, LANES).first * 1_000

    return run


def gate(url: str, messages: int) -> Callable[[], float]:
    def run() -> float:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET jit = off")
            day = connection.execute(DAY).fetchone()
            began = time.perf_counter()
            open_messages = connection.execute(GATE, day).fetchone()
            spent = time.perf_counter() - began
            assert open_messages == (0,), f"{open_messages} of {messages}"
        return spent * 1_000

    return run
