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
from threading import Thread
from uuid import UUID

import psycopg
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from benchmarks.conditions import Conditions
from benchmarks.consuming import NAME
from benchmarks.doorbell import INSERT, answers_of_waits
from benchmarks.drain import REPOSITORY
from benchmarks.handled import PROBES
from benchmarks.measure import Answer
from benchmarks.workload import TOPIC
from pillarbox.inbox.consumer import Consumer
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import add_reader
from pillarbox.outbox.lane import Priority, lane_of
from pillarbox.outbox.message import Message
from pillarbox.outbox.message_id import uuid7
from pillarbox.outbox.postgres.connection import sqlalchemy_url

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

    def waits() -> list[float]:
        with conditions.migrated_database() as url:
            return milliseconds(url, messages)

    yield from answers_of_waits(
        conditions,
        "slow handlers: commit to start of others",
        waits,
        {50: None, 99: BOUND},
        MESSAGES_A_SECOND,
    )


def milliseconds(url: str, messages: int) -> list[float]:
    """Return how long each message waited that is behind no slow one of its key."""
    with administration(url, application_name=NAME) as connection:
        add_reader(connection, NAME, [TOPIC], for_consumer=True)
    command = [sys.executable, "-m", "benchmarks.slow_handlers", url]
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


async def main(url: str) -> None:
    engine = create_async_engine(sqlalchemy_url(url), pool_size=IN_FLIGHT + 1)
    consumer = Consumer(
        url, async_sessionmaker(engine), name=NAME, max_in_flight=IN_FLIGHT
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
    asyncio.run(main(parser.parse_args().database_url))
