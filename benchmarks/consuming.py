"""A consumer with an empty handler in its own process, and how long it takes.

`consume` starts the process, which runs `python -m benchmarks.consuming`.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from benchmarks.drain import REPOSITORY
from benchmarks.workload import TOPIC
from pillarbox.inbox.consumer import Consumer
from pillarbox.inbox.events import MessageHandled
from pillarbox.outbox.errors import OutboxError
from pillarbox.outbox.events import Event
from pillarbox.outbox.message import Message
from pillarbox.outbox.postgres.connection import sqlalchemy_url

NAME = "benchmark"
CONNECTIONS = 16
BATCH = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How messages are handled.

    Attributes:
        batch: the messages in one transaction; None for a handler of one message.
        max_in_flight: the most handlers that run at once, or the most messages in
            running and gathering batches.
    """

    label: str
    batch: int | None
    max_in_flight: int


# While one batch is handled, the next one gathers, so two are in flight.
BATCHES = Way(label="in batches", batch=BATCH, max_in_flight=2 * BATCH)
SINGLE = Way(label="one by one", batch=None, max_in_flight=CONNECTIONS)
WAYS = {way.label: way for way in (BATCHES, SINGLE)}


def consume(database_url: str, broker_url: str, messages: int, way: Way) -> float:
    """Handle all messages of a broker; return messages per second, receipts included.

    The time runs from the consumer's start until it has written the last ack.
    """
    command = [sys.executable, "-m", "benchmarks.consuming", database_url, broker_url]
    done = subprocess.run(
        [*command, str(messages), way.label],
        cwd=REPOSITORY,
        check=False,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise OutboxError(f"the consumer ended with {done.returncode}")
    with psycopg.connect(database_url) as connection:
        row = connection.execute("SELECT count(*) FROM inbox.receipt").fetchone()
    assert row is not None
    if row[0] != messages:
        raise OutboxError(f"{row[0]} receipts for {messages} messages")
    return messages / float(done.stdout)


async def main(database_url: str, broker_url: str, messages: int, way: Way) -> None:
    engine = create_async_engine(sqlalchemy_url(database_url), pool_size=CONNECTIONS)
    consumer = Consumer(
        broker_url,
        async_sessionmaker(engine),
        name=NAME,
        max_in_flight=way.max_in_flight,
    )
    stop_after(consumer, messages)
    if way.batch is None:
        consumer.handles(TOPIC)(handle_nothing)
    else:
        consumer.handles_batch(TOPIC, max_size=way.batch)(handle_no_batch)
    started = time.perf_counter()
    await consumer.run()
    print(time.perf_counter() - started)
    await engine.dispose()


def stop_after(consumer: Consumer, messages: int) -> None:
    """Stop a consumer once it has handled this many messages."""
    handled = 0

    def count(event: Event) -> None:
        nonlocal handled
        handled += isinstance(event, MessageHandled)
        if handled == messages:
            consumer.stop()

    consumer.observe(count)


async def handle_nothing(session: AsyncSession, message: Message) -> None:
    """Accept every message at once."""


async def handle_no_batch(session: AsyncSession, messages: Sequence[Message]) -> None:
    """Accept every batch at once."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("database_url")
    parser.add_argument("broker_url")
    parser.add_argument("messages", type=int)
    parser.add_argument("way", choices=WAYS)
    given = parser.parse_args()
    asyncio.run(
        main(given.database_url, given.broker_url, given.messages, WAYS[given.way])
    )
