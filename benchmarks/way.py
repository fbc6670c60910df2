"""How long the way of a message is: Python calls, statements, round trips, and time.

Three ways, each in a process of its own: a consumer that reads the outbox itself, a
relay whose publisher does nothing, and a bare loop that LISTENs, SELECTs, and inserts a
receipt and a row for each message with an `AsyncSession`. Messages come one at a time,
or all at once. Those that are counted wait for the one before, about 20 a second; those
that are timed come 20 a second.

A call is counted each time a Python function begins, or a generator or coroutine goes
on, in any thread of the process (`call` of `sys.setprofile`); functions written in C
are not counted. All that the process does in the meantime counts, also its heartbeats.
So these figures are the same on any machine, but for what depends on timers.

`python -m benchmarks.way` runs such a process; it prints its calls for each line that
it reads.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median, quantiles
from types import FrameType
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from benchmarks.conditions import Conditions, show
from benchmarks.consuming import CONNECTIONS, NAME
from benchmarks.doorbell import INSERT
from benchmarks.drain import REPOSITORY
from benchmarks.fill import unpublished
from benchmarks.handlers import RECEIPT
from benchmarks.measure import (
    Answer,
    Series,
    Variant,
    alternate,
    at_most,
    noise,
    quantity,
)
from benchmarks.null_publisher import NullPublisher
from benchmarks.wire import Wire, proxied
from benchmarks.workload import TOPIC, payload
from inbox.consumer import Consumer
from outbox.administration.connection import administration
from outbox.administration.readers import add_reader
from outbox.lane import Priority, lane_of
from outbox.message import Message
from outbox.message_id import moment_of, uuid7
from outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from outbox.postgres.connection import sqlalchemy_url
from relay.relay import Relay

SOURCE_OPTIONS = "direct=true"
"""Those of the URL of a consumer that reads the outbox itself."""
CONSUMER, RELAY, BARE = "consumer", "relay", "bare loop"
WAYS = (CONSUMER, RELAY, BARE)
CLAIM = "Read the next messages of leased lanes"
WARM_UP = 20
MESSAGES_A_SECOND = 20
AT_ONCE = 256
POLL = 0.05
TABLE = """
CREATE TABLE effect (
    id uuid PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    payload bytea NOT NULL
)
"""
EFFECT = text("INSERT INTO effect (id, payload) VALUES (:id, :payload)")
SELECT = """
SELECT id, topic, key, payload FROM outbox.message WHERE id > %s ORDER BY id LIMIT %s
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a process has spent on each message."""

    calls: float
    round_trips: float
    statements: Mapping[str, float]

    def count(self, label: str = "") -> float:
        """Return how many statements begin like this."""
        return sum(n for name, n in self.statements.items() if name.startswith(label))

    def __str__(self) -> str:
        """Return all of it, the most frequent statements first."""
        shown = sorted(self.statements.items(), key=lambda one: -one[1])
        listed = ", ".join(f"{n:.2f} {name}" for name, n in shown if n >= 0.05)
        return (
            f"{self.calls:,.0f} calls, {self.count():.2f} statements, "
            f"{self.round_trips:.2f} round trips: {listed}"
        )


def answers(conditions: Conditions) -> Iterator[Answer]:
    alone, backlog = (
        conditions.size(300, quick=100),
        conditions.size(5_000, quick=1_000),
    )
    spent = {way: counts(conditions, way, alone, backlog) for way in WAYS}
    for way, (one, many) in spent.items():
        targets = {RELAY: at_most(2_500)}
        for name, each in (("one at a time", one), ("backlog", many)):
            yield Answer(
                question=f"way: {way}, {name}, Python calls",
                figure=each.calls,
                unit="calls",
                target=targets.get(way) if each is one else None,
                detail=str(each),
            )
    one = spent[CONSUMER][0]
    yield Answer(
        question="way: consumer's calls, one at a time, against the bare loop's",
        figure=one.calls / spent[BARE][0].calls,
        target=at_most(2.5),
        detail=f"{one.calls:,.0f} and {spent[BARE][0].calls:,.0f} calls",
    )
    for way in (CONSUMER, RELAY):
        yield Answer(
            question=f"way: {way}, claims for a message that comes alone",
            figure=spent[way][0].count(CLAIM),
            unit="",
            target=at_most(1.0),
            detail=str(spent[way][0]),
        )
    yield from times(conditions)


def counts(
    conditions: Conditions, way: str, alone: int, backlog: int
) -> tuple[Spent, Spent]:
    """Count what a process spends on messages that come alone, and on a backlog."""
    with conditions.migrated_database() as url:
        prepare(url)
        with proxied(url) as (through, wire), running(way, through, counted=True) as it:
            write(url, WARM_UP)
            wait(url, way)
            first = it.mark(wire)
            for _ in range(alone):
                write(url, 1)
                wait(url, way)
            second = it.mark(wire)
            write(url, backlog)
            wait(url, way)
            third = it.mark(wire)
    spent = since(first, second, alone), since(second, third, backlog)
    for each in spent:
        print(f"  {way}: {each}", file=sys.stderr)
    return spent


def times(conditions: Conditions) -> Iterator[Answer]:
    """Measure from commit to the handler's row, by the server's clock."""
    messages = conditions.size(400, quick=100)
    taken: dict[str, list[Sequence[float]]] = {CONSUMER: [], BARE: []}

    def run(way: str) -> float:
        with conditions.migrated_database() as url:
            prepare(url)
            with running(way, url, counted=False):
                write(url, WARM_UP)
                wait(url, way)
                committed = write(url, messages, MESSAGES_A_SECOND)
                wait(url, way)
            taken[way].append(waits(url, committed))
        return median(taken[way][-1])

    alternate(
        [Variant(label=way, run=lambda way=way: run(way)) for way in taken],  # type: ignore[misc]
        runs=conditions.runs(4),
        on_run=lambda label, figure: show(label, figure, "ms (median)"),
    )
    for percent, bound in {50: 2.0, 99: 3.0}.items():
        figures = {
            way: [quantiles(each, n=100)[percent - 1] for each in runs]
            for way, runs in taken.items()
        }
        ours, bare = figures[CONSUMER], figures[BARE]
        name = "median" if percent == 50 else f"{percent}th percentile"
        yield Answer(
            question=f"way: commit to the handler's row against the bare loop, {name}",
            figure=median(ours) / median(bare),
            target=at_most(bound),
            noise=noise(
                Series(label=CONSUMER, figures=tuple(ours[0::2])),
                Series(label=CONSUMER, figures=tuple(ours[1::2])),
            ),
            detail=f"{quantity(median(ours), 'ms')} and {quantity(median(bare), 'ms')},"
            f" {messages:,} messages, {MESSAGES_A_SECOND} a second",
        )


def prepare(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(TABLE)
    with administration(url, application_name=NAME) as connection:
        add_reader(connection, NAME, [TOPIC], broker=source_of(url))


def source_of(url: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{SOURCE_OPTIONS}"


def write(url: str, messages: int, a_second: float = 0) -> dict[UUID, datetime]:
    """Commit messages evenly spaced, or all at once; return when each commit began."""
    committed = {}
    with psycopg.connect(url) as connection:
        # Otherwise each time would include the disk's.
        connection.execute("SET synchronous_commit = off")
        connection.commit()
        started = time.monotonic()
        for number in range(messages):
            if a_second:
                due = started + number / a_second
                time.sleep(max(0.0, due - time.monotonic()))
            id, key = uuid7(), f"order-{number}"
            lane = lane_of(key, id, Priority.DEFAULT)
            connection.execute(INSERT, (id, lane, TOPIC, key, payload(number, 300)))
            if a_second:
                row = connection.execute("SELECT clock_timestamp()").fetchone()
                assert row is not None
                (committed[id],) = row
                connection.commit()
    return committed


def wait(url: str, way: str) -> None:
    """Wait until all messages are settled, or inserted by the bare loop."""
    while unpublished(url) if way != BARE else unhandled(url):
        time.sleep(POLL)


def unhandled(url: str) -> int:
    with psycopg.connect(url) as connection:
        ((left,),) = connection.execute(
            "SELECT (SELECT count(*) FROM outbox.message)"
            " - (SELECT count(*) FROM effect)"
        )
    return int(left)


def waits(url: str, committed: Mapping[UUID, datetime]) -> list[float]:
    """Return how many milliseconds each message took."""
    with psycopg.connect(url) as connection:
        handled = dict(connection.execute("SELECT id, at FROM effect").fetchall())
    millisecond = timedelta(milliseconds=1)
    return [(handled[id] - moment) / millisecond for id, moment in committed.items()]


@dataclass(frozen=True, slots=True)
class Mark:
    """What has been counted so far."""

    calls: int
    round_trips: int
    statements: Counter[str]


def since(one: Mark, other: Mark, messages: int) -> Spent:
    statements = other.statements - one.statements
    return Spent(
        calls=(other.calls - one.calls) / messages,
        round_trips=(other.round_trips - one.round_trips) / messages,
        statements={name: count / messages for name, count in statements.items()},
    )


class Running:
    """A running process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def mark(self, wire: Wire) -> Mark:
        """Return what it has counted so far."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        calls = int(process.stdout.readline())
        return Mark(calls, wire.round_trips, Counter(wire.statements))


@contextmanager
def running(way: str, url: str, *, counted: bool) -> Iterator[Running]:
    """Start a process."""
    command = [sys.executable, "-m", "benchmarks.way", way, url]
    process = subprocess.Popen(
        [*command, *(["--counted"] if counted else [])],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Running(process)
    finally:
        process.kill()
        process.communicate()


class Calls:
    """Counts the Python calls of all threads that start from now on, and of this."""

    def __init__(self) -> None:
        self.number = 0

    def count(self) -> None:
        # First, since it calls functions, too.
        threading.Thread(target=self._report, daemon=True).start()
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            self.number += 1

    def _report(self) -> None:
        for _ in sys.stdin:
            print(self.number, flush=True)


async def consume(url: str) -> None:
    engine = create_async_engine(sqlalchemy_url(url), pool_size=CONNECTIONS)
    consumer = Consumer(source_of(url), async_sessionmaker(engine), name=NAME)

    @consumer.handles(TOPIC)
    async def handle(session: AsyncSession, message: Message) -> None:
        await session.execute(EFFECT, {"id": message.id, "payload": message.payload})

    await consumer.run()


async def publish(url: str) -> None:
    await Relay(url, NullPublisher()).run()


async def loop(url: str) -> None:
    engine = create_async_engine(sqlalchemy_url(url), pool_size=CONNECTIONS)
    sessions, last = async_sessionmaker(engine), UUID(int=0)
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as listening:
        await listening.execute("LISTEN outbox_message")
        lock = [LOCK_CLASS, int(Lock.OUTBOX_DOORBELL)]
        await listening.execute("SELECT pg_advisory_lock(%s, %s)", lock)
        while True:
            cursor = await listening.execute(SELECT, [last, AT_ONCE])
            rows = await cursor.fetchall()
            for last, topic, key, body in rows:
                message = Message(topic, body, key=key, id=last)
                await insert(sessions, message)
            if not rows:
                async for _ in listening.notifies(timeout=1, stop_after=1):
                    pass


async def insert(sessions: Any, message: Message) -> None:
    async with sessions.begin() as session:
        at = moment_of(message.id)
        await session.execute(RECEIPT, {"id": message.id, "at": at, "consumer": NAME})
        await session.execute(EFFECT, {"id": message.id, "payload": message.payload})


RUNS = {CONSUMER: consume, RELAY: publish, BARE: loop}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("database_url")
    parser.add_argument("--counted", action="store_true")
    given = parser.parse_args()
    if given.counted:
        Calls().count()
    asyncio.run(RUNS[given.way](given.database_url))
