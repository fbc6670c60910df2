"""How fast messages go from the outbox through a broker to a row, and how soon.

One relay and one program that handles: our consumer, one by one or in batches, the bare
client, and FastStream (see `benchmarks.subscribers`), each in a process of its own. The
rate is counted from the commit of a backlog to its last row; then messages come 200 a
second, and each is timed from its commit to its row by the server's clock.

The calls, statements and round trips of a message are counted as in `benchmarks.way`.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from statistics import median, quantiles
from typing import Any, Final

import psycopg
from pika import BlockingConnection, URLParameters
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from benchmarks import subscribers
from benchmarks.brokers import BROKERS
from benchmarks.conditions import Conditions, show
from benchmarks.consuming import BATCHES, CONNECTIONS, NAME, SINGLE, Way
from benchmarks.doorbell import INSERT
from benchmarks.drain import REPOSITORY, publisher_of
from benchmarks.measure import (
    Answer,
    Target,
    Variant,
    alternate,
    at_least,
    at_most,
    quantity,
)
from benchmarks.way import Calls, Mark, Running, Spent
from benchmarks.wire import Wire, proxied
from benchmarks.workload import TOPIC, payload
from pillarbox.inbox.consumer import Consumer
from pillarbox.outbox.brokers.rabbitmq.options import RabbitMQOptions
from pillarbox.outbox.lane import Priority, lane_of
from pillarbox.outbox.message import Message
from pillarbox.outbox.message_id import uuid7
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.relay.relay import Relay

SINGLY, IN_BATCHES, BARE, FASTSTREAM, RELAY = (
    "consumer",
    "batches",
    "bare client",
    "FastStream",
    "relay",
)
HANDLING: Final = (SINGLY, IN_BATCHES, BARE, FASTSTREAM)
NAMES: Final = ("redis", "nats", "rabbitmq", "kafka")
TABLE = """
CREATE TABLE effect (
    payload bytea NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""
ROWS = "SELECT count(*) FROM effect"
MOMENTS = """
SELECT (convert_from(payload, 'UTF8')::json ->> 'order_id')::int, at FROM effect
"""
A_SECOND: Final = 200
WARM_UP: Final = 20
KEYS: Final = 1_000
POLL: Final = 0.02
IDLE: Final = 3.0
"""Seconds in which it is counted what idle processes spend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What the runs of one program have taken."""

    rates: list[float] = field(default_factory=list)
    waits: list[Sequence[float]] = field(default_factory=list)

    def percentile(self, percent: int) -> float:
        """Return the median over all runs, in milliseconds."""
        return median(quantiles(each, n=100)[percent - 1] for each in self.waits)


def answers(conditions: Conditions) -> Iterator[Answer]:
    for name in NAMES:
        yield from answers_of(conditions, name)


def answers_of(conditions: Conditions, name: str) -> Iterator[Answer]:
    backlog = conditions.size(10_000, quick=3_000)
    timed = conditions.size(2_000, quick=600)
    taken = {label: Taken() for label in HANDLING}

    def run(label: str) -> float:
        with on_their_way(conditions, name, label) as way:
            rate = way.rate(backlog)
            taken[label].rates.append(rate)
            taken[label].waits.append(way.waits(timed))
        return rate

    alternate(
        [Variant(label=label, run=lambda label=label: run(label)) for label in taken],  # type: ignore[misc]
        runs=conditions.runs(4),
        on_run=lambda label, figure: show(label, figure, "/s"),
    )
    rates = {label: median(each.rates) for label, each in taken.items()}
    for label, other, target in (
        (SINGLY, BARE, at_least(0.7)),
        (SINGLY, FASTSTREAM, at_least(0.9)),
        (IN_BATCHES, FASTSTREAM, at_least(5.0)),
    ):
        yield Answer(
            question=f"{name}, whole way: {label} against {other}",
            figure=rates[label] / rates[other],
            target=target,
            noise=max(taken[label].rates) / min(taken[label].rates),
            detail=", ".join(f"{n} {quantity(r, '/s')}" for n, r in rates.items()),
        )
    for percent, target in {50: at_most(2.5), 99: at_most(10.0)}.items():
        yield latency(name, taken, percent, target)
    yield from counted(conditions, name)


def latency(
    name: str, taken: Mapping[str, Taken], percent: int, target: Target
) -> Answer:
    found = {label: each.percentile(percent) for label, each in taken.items()}
    which = "median" if percent == 50 else f"{percent}th percentile"
    return Answer(
        question=f"{name}, commit to row, {A_SECOND} a second, {which}: against {BARE}",
        figure=found[SINGLY] / found[BARE],
        target=target,
        detail=", ".join(f"{n} {quantity(ms, 'ms')}" for n, ms in found.items()),
    )


def counted(conditions: Conditions, name: str) -> Iterator[Answer]:
    """Count what the relay and the consumer spend on messages that come one by one."""
    alone = conditions.size(300, quick=100)
    with on_their_way(conditions, name, SINGLY, counted=True) as way:
        for label, spent in way.spent(alone).items():
            yield Answer(
                question=f"{name}: {label}, one at a time, Python calls",
                figure=spent.calls,
                unit="calls",
                detail=str(spent),
            )


class OnTheirWay:
    """A relay and a program that handles, while they run."""

    def __init__(
        self,
        connection: psycopg.Connection,
        running: Mapping[str, tuple[Running, Wire]],
    ) -> None:
        self._connection = connection
        self._running = running
        self._number = 0

    def warm_up(self) -> None:
        for _ in range(WARM_UP):
            self._write()
            self._wait()

    def rate(self, messages: int) -> float:
        """Return the messages handled per second, from their commit."""
        with self._connection.transaction():
            for _ in range(messages):
                self._write()
        started = time.perf_counter()
        self._wait()
        return messages / (time.perf_counter() - started)

    def waits(self, messages: int) -> Sequence[float]:
        """Return the milliseconds from the commit of each message to its row."""
        committed: dict[int, datetime] = {}
        started = time.monotonic()
        for n in range(messages):
            time.sleep(max(0.0, started + n / A_SECOND - time.monotonic()))
            number = self._number
            committed[number] = self._write()
        self._wait()
        moments: dict[int, datetime] = dict(
            self._connection.execute(MOMENTS).fetchall()
        )
        millisecond = timedelta(milliseconds=1)
        return [(moments[n] - at) / millisecond for n, at in committed.items()]

    def spent(self, messages: int) -> Mapping[str, Spent]:
        """Count what each process spends on a message that comes alone."""
        marks = [self._marks()]
        time.sleep(IDLE)
        marks.append(self._marks())
        for _ in range(messages):
            self._write()
            self._wait()
        marks.append(self._marks())
        before, idle, after = marks
        return {
            label: after[label]
            .since(idle[label])
            .without(idle[label].since(before[label]))
            .of(messages)
            for label in self._running
        }

    def _marks(self) -> Mapping[str, Mark]:
        return {label: it.mark(wire) for label, (it, wire) in self._running.items()}

    def _write(self) -> datetime:
        """Insert a message; return when it was about to be committed."""
        key, id = f"order-{self._number % KEYS}", uuid7()
        body = payload(self._number, 300)
        row = (id, lane_of(key, id, Priority.DEFAULT), TOPIC, key, body)
        self._number += 1
        with self._connection.transaction():
            self._connection.execute(INSERT, row)
            found = self._connection.execute("SELECT clock_timestamp()").fetchone()
        assert found is not None
        at: datetime = found[0]
        return at

    def _wait(self) -> None:
        """Wait until each message has a row."""
        while self._connection.execute(ROWS).fetchone() != (self._number,):
            time.sleep(POLL)


@contextmanager
def on_their_way(
    conditions: Conditions, name: str, label: str, *, counted: bool = False
) -> Iterator[OnTheirWay]:
    """Start broker, relay and program, and send the first messages."""
    with ExitStack() as stack:
        broker_url = stack.enter_context(BROKERS[name].server())
        if name == "rabbitmq":
            make_queue(broker_url)
        url = stack.enter_context(conditions.migrated_database())
        connection = stack.enter_context(psycopg.connect(url, autocommit=True))
        connection.execute("SET synchronous_commit = off")
        connection.execute(TABLE)
        running = {
            each: stack.enter_context(process(each, url, broker_url, counted=counted))
            for each in (label, RELAY)
        }
        way = OnTheirWay(connection, running)
        way.warm_up()
        yield way


def make_queue(url: str) -> None:
    """Create the queue that all programs read, as our consumer does."""
    with BlockingConnection(URLParameters(url)) as connection:
        channel = connection.channel()
        channel.queue_delete(TOPIC)
        channel.queue_declare(NAME, durable=True, arguments={"x-queue-type": "quorum"})
        channel.queue_bind(NAME, RabbitMQOptions.exchange, TOPIC)


@contextmanager
def process(
    label: str,
    url: str,
    broker_url: str,
    *,
    counted: bool,
    module: str = "benchmarks.whole_way",
) -> Iterator[tuple[Running, Wire]]:
    """Start a program; if it is counted, its connections lead through a proxy."""
    with ExitStack() as stack:
        wire = Wire()
        if counted:
            url, wire = stack.enter_context(proxied(url))
        command = [sys.executable, "-m", module, label, url, broker_url]
        started = subprocess.Popen(
            [*command, *(["--counted"] if counted else [])],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield Running(started), wire
        finally:
            started.kill()
            started.communicate()


async def publish(url: str, broker_url: str) -> None:
    await Relay(url, publisher_of(broker_url)).run()


def consuming(way: Way) -> Program:
    async def run(url: str, broker_url: str) -> None:
        consumer = Consumer(
            broker_url, sessions(url), name=NAME, max_in_flight=way.max_in_flight
        )
        if way.batch is None:
            consumer.handles(TOPIC)(handle)
        else:
            consumer.handles_batch(TOPIC, max_size=way.batch)(handle_batch)
        await consumer.run()

    return run


async def handle(session: AsyncSession, message: Message) -> None:
    await session.execute(subscribers.EFFECT, {"payload": message.payload})


async def handle_batch(session: AsyncSession, messages: Sequence[Message]) -> None:
    rows = [{"payload": message.payload} for message in messages]
    await session.execute(subscribers.EFFECT, rows)


def sessions(url: str) -> async_sessionmaker[AsyncSession]:
    engine = create_async_engine(sqlalchemy_url(url), pool_size=CONNECTIONS)
    return async_sessionmaker(engine)


Program = Callable[[str, str], Coroutine[Any, Any, None]]
PROGRAMS: Final[Mapping[str, Program]] = {
    SINGLY: consuming(SINGLE),
    IN_BATCHES: consuming(BATCHES),
    BARE: lambda url, broker_url: subscribers.bare(broker_url, sessions(url)),
    FASTSTREAM: lambda url, broker_url: subscribers.faststream(
        broker_url, sessions(url)
    ),
    RELAY: publish,
}


def main(programs: Mapping[str, Program]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=programs)
    parser.add_argument("database_url")
    parser.add_argument("broker_url")
    parser.add_argument("--counted", action="store_true")
    given = parser.parse_args()
    if given.counted:
        Calls().count()
    asyncio.run(programs[given.program](given.database_url, given.broker_url))


if __name__ == "__main__":
    main(PROGRAMS)
