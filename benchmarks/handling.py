"""A consumer in its own process that compares payloads with those in the file.

It prints READY once it is subscribed. After the last message it prints the time, in
seconds of the clock that all processes on the machine share.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from benchmarks.arrivals import READY
from benchmarks.drain import REPOSITORY
from benchmarks.recorded_webhooks import read
from inbox.consumer import Consumer
from inbox.events import ConsumerStarted
from outbox.errors import OutboxError
from outbox.events import Event
from outbox.message import Message
from outbox.postgres.connection import sqlalchemy_url

CONNECTIONS = 16


class Handling:
    """The running process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def wait(self) -> float:
        """Wait until all messages are handled; return the time of the last."""
        out, _ = self._process.communicate()
        if self._process.returncode:
            raise OutboxError(f"the consumer ended with {self._process.returncode}")
        return float(out)


@contextmanager
def handling(database_url: str, webhooks: Path, messages: int) -> Iterator[Handling]:
    """Start the process, and enter the block once it is subscribed."""
    command = [sys.executable, "-m", "benchmarks.handling", database_url]
    process = subprocess.Popen(
        [*command, str(webhooks), str(messages)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != READY:
            raise OutboxError(f"the consumer ended with {process.wait()} at its start")
        yield Handling(process)
    finally:
        process.kill()
        process.wait()


async def main(database_url: str, webhooks: Path, messages: int) -> None:
    expected = {webhook.payload for webhook in read(webhooks)}
    handled = set()
    engine = create_async_engine(sqlalchemy_url(database_url), pool_size=CONNECTIONS)
    consumer = Consumer(
        database_url,
        async_sessionmaker(engine),
        name="benchmark",
        max_in_flight=CONNECTIONS,
    )

    @consumer.handles("github.*")
    async def compare(session: AsyncSession, message: Message) -> None:
        if message.payload not in expected:
            raise OutboxError(f"{message} has a payload that was never added")
        handled.add(message.id)
        if len(handled) == messages:
            consumer.stop()

    def say_ready(event: Event) -> None:
        if isinstance(event, ConsumerStarted):
            print(READY, flush=True)

    consumer.observe(say_ready)
    await consumer.run()
    print(time.monotonic())
    await engine.dispose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("database_url")
    parser.add_argument("webhooks", type=Path)
    parser.add_argument("messages", type=int)
    given = parser.parse_args()
    asyncio.run(main(given.database_url, given.webhooks, given.messages))
