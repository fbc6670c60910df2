"""What the relay costs while other transactions stay open in the cluster.

A transaction that has written anything, in any database, may still commit a message
with a low seq. So a relay must not forget it, and should not pay for it either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread

import psycopg

from benchmarks.conditions import Conditions, show
from benchmarks.drain import NOWHERE, draining
from benchmarks.fill import fill
from benchmarks.live import LiveBatch
from benchmarks.measure import Answer, Variant, at_most, measure
from benchmarks.settling import TICKS, ended_children, parent_of, wait_for_sessions
from benchmarks.workload import TOPIC, Workload, payload
from pillarbox.outbox.lane import PRIORITIES, Priority, lane_of
from pillarbox.outbox.message_id import uuid7

SLOW_WRITERS = 20
SLOW_FOR = 1.0
RATE = 1_900
WRITERS = 4
IDLE_FOR = 20
TAKEOVER = 3.0
"""Seconds after which a relay that has connected is idle."""
MORE = 1
"""Messages that never come, so that the idle relay doesn't stop."""
TABLE = "CREATE TABLE IF NOT EXISTS bench_other (number int)"
WRITE = "INSERT INTO bench_other VALUES (1)"
BACKENDS = """
SELECT pid FROM pg_stat_activity
 WHERE application_name ~ '^pillarbox relay .* (worker|shared|lease|doorbell)$'
"""
INSERT = """
INSERT INTO outbox.message (id, lane, topic, key, content_type, payload)
VALUES (%s, %s, %s, %s, 'application/json', %s)
"""

Beside = Callable[[str], AbstractContextManager[None]]


def answers(conditions: Conditions) -> Iterator[Answer]:
    backlog = Workload(messages=conditions.size(300_000, quick=40_000))
    yield from compare(
        f"draining {backlog.messages:,}",
        lambda beside: cost_of_draining(conditions, backlog, beside),
        conditions,
    )
    seconds = conditions.size(20, quick=4)
    yield from compare(
        f"{RATE:,} a second",
        lambda beside: cost_of_arriving(conditions, seconds * RATE, beside),
        conditions,
    )
    yield from idle(conditions)


def compare(
    name: str, cost: Callable[[Beside], float], conditions: Conditions
) -> Iterator[Answer]:
    """Compare the processor time of a message beside other writers and alone."""
    others = {"an open writer": open_writer, f"{SLOW_WRITERS} slow writers": slow_ones}
    found = measure(
        Variant(label="alone", run=partial(cost, nobody)),
        *(Variant(label=label, run=partial(cost, by)) for label, by in others.items()),
        runs=conditions.runs(3),
        on_run=lambda label, figure: show(label, figure, "µs"),
    )
    for label in others:
        yield Answer(
            question=f"{name}: CPU beside {label} against alone",
            figure=1 / found.ratio(label),
            target=at_most(1.2),
            noise=found.noise,
            detail=f"of the relay's backends, a message: {found.medians('µs')}",
        )


def cost_of_draining(
    conditions: Conditions, workload: Workload, beside: Beside
) -> float:
    """Return the processor time of draining a backlog, in µs a message."""
    with conditions.migrated_database() as url, beside(url), measured(url) as used:
        fill(url, workload)
        used()
        with draining(url, workload.messages, NOWHERE) as relay:
            relay.wait()
        return used() / workload.messages


def cost_of_arriving(conditions: Conditions, messages: int, beside: Beside) -> float:
    """Return the processor time of publishing what is being written, in µs each."""
    with (
        conditions.migrated_database() as url,
        beside(url),
        measured(url) as used,
        ExitStack() as stack,
    ):
        writers = [
            stack.enter_context(psycopg.connect(url, autocommit=True))
            for _ in range(WRITERS)
        ]
        used()
        with draining(url, messages, NOWHERE) as relay:
            backends(url)
            threads = [
                Thread(target=write, args=(writer, messages // WRITERS))
                for writer in writers
            ]
            for thread in threads:
                thread.start()
            relay.wait()
            for thread in threads:
                thread.join()
        return used() / messages


def write(connection: psycopg.Connection, messages: int) -> None:
    """Commit one message at a time, evenly spaced."""
    started = time.monotonic()
    for number in range(messages):
        due = started + number * WRITERS / RATE
        time.sleep(max(0.0, due - time.monotonic()))
        id, key = uuid7(), f"order-{number % 1_000}"
        lane = lane_of(key, id, Priority.DEFAULT)
        connection.execute(INSERT, (id, lane, TOPIC, key, payload(number, 300)))


def idle(conditions: Conditions) -> Iterator[Answer]:
    """Measure an idle relay, with a million messages since the open writer began."""
    workload = Workload(messages=conditions.size(1_000_000, quick=100_000))
    detail = f"{workload.messages:,} settled since a writer in another database began"
    with (
        conditions.empty_database() as other,
        conditions.migrated_database() as url,
        open_writer(other),
    ):
        fill(url, workload)
        with draining(url, workload.messages, NOWHERE) as relay:
            relay.wait()
        with draining(url, MORE, NOWHERE):
            pids = backends(url)
            time.sleep(TAKEOVER)
            before, since = ticks(pids), time.monotonic()
            time.sleep(conditions.size(IDLE_FOR, quick=5))
            used = (ticks(pids) - before) / TICKS
            yield Answer(
                question="idle relay beside an open writer",
                figure=used / (time.monotonic() - since),
                unit="cores",
                target=at_most(0.05),
                detail=detail,
            )
        batch = LiveBatch(url, 0)
        try:
            yield Answer(
                question="idle claim beside an open writer",
                figure=batch.claim_nothing(),
                unit="ms",
                target=at_most(2),
                detail=detail,
            )
        finally:
            batch.close()


@contextmanager
def measured(url: str) -> Iterator[Callable[[], float]]:
    """Yield what returns the µs that the relay's backends used since its last call."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET autovacuum = off")
        connection.execute("SELECT pg_reload_conf()")
        postmaster = parent_of(connection.info.backend_pid)
        before = 0

        def used() -> float:
            nonlocal before
            wait_for_sessions(connection)
            since, before = before, ended_children(postmaster)
            return (before - since) * 1e6 / TICKS

        yield used


def backends(url: str) -> list[int]:
    """Wait until all workers of a relay have connected; return their backends."""
    with psycopg.connect(url, autocommit=True) as connection:
        while len(found := connection.execute(BACKENDS).fetchall()) < len(PRIORITIES):
            pass
    return [pid for (pid,) in found]


def ticks(pids: list[int]) -> int:
    """Return the processor time that processes have used, in ticks."""
    stats = [Path(f"/proc/{pid}/stat").read_text() for pid in pids]
    fields = [stat.rpartition(")")[2].split() for stat in stats]
    return sum(int(each[11]) + int(each[12]) for each in fields)


@contextmanager
def nobody(url: str) -> Iterator[None]:
    """Leave the relay alone."""
    yield


@contextmanager
def open_writer(url: str) -> Iterator[None]:
    """Hold a transaction open that has written a row."""
    with psycopg.connect(url) as connection:
        connection.execute(TABLE)
        connection.execute(WRITE)
        yield


@contextmanager
def slow_ones(url: str) -> Iterator[None]:
    """Run writers whose transactions take a second each, evenly spaced."""
    ended = Event()

    def work(connection: psycopg.Connection, pause: float) -> None:
        ended.wait(pause)
        while not ended.is_set():
            connection.execute(WRITE)
            ended.wait(SLOW_FOR)
            connection.commit()

    # The connections stay until the costs are known: only ended backends are counted.
    with ExitStack() as stack:
        connections = [
            stack.enter_context(psycopg.connect(url)) for _ in range(SLOW_WRITERS)
        ]
        connections[0].execute(TABLE)
        connections[0].commit()
        threads = [
            Thread(target=work, args=(each, number * SLOW_FOR / SLOW_WRITERS))
            for number, each in enumerate(connections)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()
