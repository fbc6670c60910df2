"""How soon a committed message is handled without a broker.

The consumer runs in its own process, `python -m benchmarks.handled`, and prints when it
has handled each message, in nanoseconds of the clock that all processes here share.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from uuid import UUID

from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from benchmarks.conditions import Conditions
from benchmarks.consuming import CONNECTIONS, NAME, handle_nothing
from benchmarks.doorbell import answers_of_waits, write
from benchmarks.drain import REPOSITORY
from benchmarks.measure import Answer
from benchmarks.workload import TOPIC
from pillarbox.inbox.consumer import Consumer
from pillarbox.inbox.events import MessageHandled
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import add_reader
from pillarbox.outbox.events import Event
from pillarbox.outbox.postgres.connection import sqlalchemy_url

WARM_UP = 20
MESSAGES_A_SECOND = 20
"""So few that two processors are idle when a message comes."""
PROBES = 0.2
"""Seconds between messages that are sent until the consumer handles the first one."""


def answers(conditions: Conditions) -> Iterator[Answer]:
    messages = conditions.size(600, quick=200)

    def waits() -> Sequence[float]:
        with conditions.migrated_database() as url:
            return milliseconds(url, messages)

    question, bounds = "postgres: commit to handled, idle", {50: 3.0, 99: None}
    yield from answers_of_waits(conditions, question, waits, bounds, MESSAGES_A_SECOND)


def milliseconds(url: str, messages: int) -> list[float]:
    """Return how long each message took, except those of the warm-up."""
    with administration(url, application_name=NAME) as connection:
        add_reader(connection, NAME, [TOPIC], for_consumer=True)
    with handling(url) as handled:
        while not handled:
            write(url, 1)
            time.sleep(PROBES)
        committed = write(url, WARM_UP + messages, MESSAGES_A_SECOND)
        while not committed.keys() <= handled.keys():
            time.sleep(PROBES)
    measured = list(committed.items())[WARM_UP:]
    return [(handled[id] - moment) / 1_000_000 for id, moment in measured]


@contextmanager
def handling(url: str) -> Iterator[dict[UUID, int]]:
    """Start the process; yield when each message was handled, as it is reported."""
    command = [sys.executable, "-m", "benchmarks.handled", url]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    handled: dict[UUID, int] = {}

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            id, moment = line.split()
            handled[UUID(id)] = int(moment)

    reader = Thread(target=read)
    reader.start()
    try:
        yield handled
    finally:
        process.kill()
        process.wait()
        reader.join()


async def main(url: str) -> None:
    engine = create_async_engine(sqlalchemy_url(url), pool_size=CONNECTIONS)

    def report(event: Event) -> None:
        if isinstance(event, MessageHandled):
            print(event.id, time.monotonic_ns(), flush=True)

    consumer = Consumer(url, async_sessionmaker(engine), name=NAME, observers=[report])
    consumer.handles(TOPIC)(handle_nothing)
    await consumer.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("database_url")
    asyncio.run(main(parser.parse_args().database_url))
