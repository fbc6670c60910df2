"""What a message costs from commit to handler: calls, statements, round trips, time.

Three programs, each in a process of its own: a consumer that reads the outbox itself, a
relay whose publisher does nothing, and a bare loop that LISTENs, SELECTs, and inserts a
receipt and a row for each message with an `AsyncSession`. Messages come one at a time,
or all at once. Those that are counted wait for the one before; those that are timed
come 20 a second.

A call is counted each time a Python function begins, or a generator or coroutine goes
on, in any thread of the process (`call` of `sys.setprofile`); functions written in C
are not counted. What an idle process spends in as much time, with heartbeats and polls,
is subtracted. So these figures are about the same on any machine.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from statistics import median, quantiles
from types import FrameType
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from typing_extensions import override

from benchmarks.conditions import Conditions, show
from benchmarks.consuming import CONNECTIONS, NAME
from benchmarks.doorbell import INSERT
from benchmarks.drain import REPOSITORY
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
from pillarbox.inbox.consumer import Consumer
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import add_reader
from pillarbox.outbox.lane import Priority, lane_of
from pillarbox.outbox.message import Message
from pillarbox.outbox.message_id import moment_of, uuid7
from pillarbox.outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.relay.relay import Relay

CONSUMER, RELAY, BARE = "consumer", "relay", "bare loop"
WAYS = (CONSUMER, RELAY, BARE)
CLAIM = "Read the next messages of leased lanes"
WARM_UP = 20
MESSAGES_A_SECOND = 20
AT_ONCE = 256
POLL = 0.02
IDLE = 5.0
"""Seconds in which it is counted what an idle process spends."""
LEFT = """
SELECT (SELECT count(*) FROM outbox.message)
     - (SELECT coalesce(sum(messages - deferred), 0) FROM outbox.position)
"""
NOT_INSERTED = """
SELECT (SELECT count(*) FROM outbox.message) - (SELECT count(*) FROM effect)
"""
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

    @override
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
        spent = counts_in(url, way, alone, backlog)
    for each in spent:
        print(f"  {way}: {each}", file=sys.stderr)
    return spent


def counts_in(
    url: str, way: str, alone: int, backlog: int, idle_for: float = IDLE
) -> tuple[Spent, Spent]:
    """Count it in a database of its own."""
    prepare(url)
    with (
        proxied(url) as (through, wire),
        running(way, through, counted=True) as it,
        connected(url) as connection,
    ):
        for _ in range(WARM_UP):
            write(connection, 1)
            wait(connection, way)
        marks = [it.mark(wire)]
        time.sleep(idle_for)
        marks.append(it.mark(wire))
        for _ in range(alone):
            write(connection, 1)
            wait(connection, way)
        marks.append(it.mark(wire))
        write(connection, backlog)
        wait(connection, way)
        marks.append(it.mark(wire))
    idle, one, many = [other.since(mark) for mark, other in pairwise(marks)]
    return one.without(idle).of(alone), many.without(idle).of(backlog)


def times(conditions: Conditions) -> Iterator[Answer]:
    """Measure from commit to the handler's row, by the server's clock."""
    messages = conditions.size(400, quick=100)
    taken: dict[str, list[Sequence[float]]] = {CONSUMER: [], BARE: []}

    def run(way: str) -> float:
        with conditions.migrated_database() as url:
            prepare(url)
            with running(way, url, counted=False), connected(url) as connection:
                write(connection, WARM_UP)
                wait(connection, way)
                committed = write(connection, messages, MESSAGES_A_SECOND)
                wait(connection, way)
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
        add_reader(connection, NAME, [TOPIC], for_consumer=True)


@contextmanager
def connected(url: str) -> Iterator[psycopg.Connection]:
    """Connect to write; otherwise each time would include the disk's."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = off")
        yield connection


def write(
    connection: psycopg.Connection, messages: int, a_second: float = 0
) -> dict[UUID, datetime]:
    """Commit messages evenly spaced, or all at once; return when commits began."""
    committed = {}
    started = time.monotonic()
    with nullcontext() if a_second else connection.transaction():
        for number in range(messages):
            if a_second:
                due = started + number / a_second
                time.sleep(max(0.0, due - time.monotonic()))
            id, key = uuid7(), f"order-{number}"
            lane = lane_of(key, id, Priority.DEFAULT)
            with connection.transaction():
                connection.execute(INSERT, (id, lane, TOPIC, key, payload(number, 300)))
                row = connection.execute("SELECT clock_timestamp()").fetchone()
            assert row is not None
            (committed[id],) = row
    return committed


def wait(connection: psycopg.Connection, way: str) -> None:
    """Wait until all messages are settled, or inserted by the bare loop."""
    while True:
        row = connection.execute(NOT_INSERTED if way == BARE else LEFT).fetchone()
        if row == (0,):
            return
        time.sleep(POLL)


def waits(url: str, committed: Mapping[UUID, datetime]) -> list[float]:
    """Return how many milliseconds each message took."""
    with psycopg.connect(url) as connection:
        handled: dict[UUID, datetime] = dict(
            connection.execute("SELECT id, at FROM effect").fetchall()
        )
    millisecond = timedelta(milliseconds=1)
    return [(handled[id] - moment) / millisecond for id, moment in committed.items()]


@dataclass(frozen=True, slots=True)
class Mark:
    """What has been counted so far, or between two such moments."""

    seconds: float
    calls: float
    round_trips: float
    statements: Mapping[str, float]

    def since(self, before: Mark) -> Mark:
        return self._less(before, 1.0)

    def without(self, idle: Mark) -> Mark:
        """Subtract what is spent in as much time by an idle process."""
        return self._less(idle, self.seconds / idle.seconds)

    def _less(self, other: Mark, share: float) -> Mark:
        return Mark(
            self.seconds - other.seconds * share,
            self.calls - other.calls * share,
            self.round_trips - other.round_trips * share,
            {
                name: count - other.statements.get(name, 0) * share
                for name, count in self.statements.items()
            },
        )

    def of(self, messages: int) -> Spent:
        return Spent(
            calls=self.calls / messages,
            round_trips=self.round_trips / messages,
            statements={name: n / messages for name, n in self.statements.items()},
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
        return Mark(time.monotonic(), calls, wire.round_trips, dict(wire.statements))


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
    consumer = Consumer(url, async_sessionmaker(engine), name=NAME)

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
