"""How soon other messages start while one handler in a hundred takes seconds.

The consumer runs in its own process, `python -m benchmarks.slow_handlers`, and prints
when it has started each message, in nanoseconds of the clock that all processes here
share. A message that is behind a slow one of its key has to wait, and isn't counted.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from threading import Thread
from uuid import UUID

import psycopg
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from benchmarks.conditions import Conditions
from benchmarks.consuming import NAME
from benchmarks.doorbell import INSERT, answers_of_waits
from benchmarks.drain import REPOSITORY, draining
from benchmarks.handled import MORE, PROBES, SUBSCRIBE
from benchmarks.measure import Answer
from benchmarks.workload import TOPIC
from inbox.consumer import Consumer
from outbox.administration.connection import administration
from outbox.administration.readers import add_reader
from outbox.lane import Priority, lane_of
from outbox.message import Message
from outbox.message_id import uuid7
from outbox.postgres.connection import sqlalchemy_url
from tests.fixtures.urls import copy_of

KEYS = 2_000
MESSAGES_A_SECOND = 200
SLOW = 5.0
"""Seconds that one handler in a hundred takes."""
ONE_IN = 100
IN_FLIGHT = 64
BOUND = 100.0
WARM_UP = 100


def answers(conditions: Conditions) -> Iterator[Answer]:
    messages = conditions.size(6_000, quick=3_000)

    def waits(*, direct: bool) -> list[float]:
        with conditions.migrated_database() as url:
            return milliseconds(url, messages, direct=direct)

    for question, direct, bound in (
        ("slow handlers, copy: commit to start of others", False, None),
        ("slow handlers, direct: commit to start of others", True, BOUND),
    ):
        run = partial(waits, direct=direct)
        yield from answers_of_waits(
            conditions, question, run, {50: None, 99: bound}, MESSAGES_A_SECOND
        )


def milliseconds(url: str, messages: int, *, direct: bool) -> list[float]:
    """Return how long each message waited that is behind no slow one of its key."""
    source = url if direct else copy_of(url)
    if not direct:
        with psycopg.connect(url) as connection:
            connection.execute(SUBSCRIBE, (NAME, TOPIC))
        with draining(url, MORE, source):
            return _measure(url, source, messages)
    with administration(url, application_name=NAME) as connection:
        add_reader(connection, NAME, [TOPIC], for_consumer=True)
    return _measure(url, source, messages)


def _measure(url: str, source: str, messages: int) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.slow_handlers", url, source]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    started: dict[UUID, int] = {}

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            id, moment = line.split()
            started[UUID(id)] = int(moment)

    reader = Thread(target=read)
    reader.start()
    draw = random.Random(1)
    committed: dict[UUID, int] = {}
    counts: set[UUID] = set()
    held: dict[str, float] = {}
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            while not started:
                _write(connection, "probe", is_slow=False)
                time.sleep(PROBES)
            began = time.monotonic()
            for number in range(WARM_UP + messages):
                time.sleep(
                    max(0.0, began + number / MESSAGES_A_SECOND - time.monotonic())
                )
                key = f"key-{draw.randrange(KEYS)}"
                is_slow = number >= WARM_UP and draw.randrange(ONE_IN) == 0
                now = time.monotonic()
                id, moment = _write(connection, key, is_slow=is_slow)
                committed[id] = moment
                if number >= WARM_UP and held.get(key, 0.0) < now:
                    counts.add(id)
                if is_slow:
                    # Twice as long, since it may start late.
                    held[key] = max(now, held.get(key, 0.0)) + 2 * SLOW
        while not counts <= started.keys():
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
        reader.join()
    return [(started[id] - committed[id]) / 1_000_000 for id in counts]


def _write(
    connection: psycopg.Connection, key: str, *, is_slow: bool
) -> tuple[UUID, int]:
    """Add a message; return its id, and when it was committed."""
    id = uuid7()
    lane = lane_of(key, id, Priority.DEFAULT)
    payload = b'"slow"' if is_slow else b'"quick"'
    connection.execute(INSERT, (id, lane, TOPIC, key, payload))
    return id, time.monotonic_ns()


async def main(url: str, source: str) -> None:
    engine = create_async_engine(sqlalchemy_url(url), pool_size=IN_FLIGHT + 1)
    consumer = Consumer(
        source, async_sessionmaker(engine), name=NAME, max_in_flight=IN_FLIGHT
    )

    @consumer.handles(TOPIC)
    async def handle(session: AsyncSession, message: Message) -> None:
        print(message.id, time.monotonic_ns(), flush=True)
        if message.payload == b'"slow"':
            await asyncio.sleep(SLOW)

    await consumer.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("database_url")
    parser.add_argument("source")
    given = parser.parse_args()
    asyncio.run(main(given.database_url, given.source))
