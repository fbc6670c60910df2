"""A relay in its own process that records when each message reaches its publisher.

It prints READY once it holds its lanes. After the last message it prints the time of
each by message id, in nanoseconds of the clock that all processes on the machine share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self
from uuid import UUID

from benchmarks.drain import REPOSITORY
from benchmarks.null_publisher import ACKED
from pillarbox.outbox.errors import OutboxError
from pillarbox.outbox.events import Event
from pillarbox.outbox.message import Message
from pillarbox.relay.events import LeaseTaken
from pillarbox.relay.publisher import Confirmation
from pillarbox.relay.relay import Relay

READY = "ready"


class NotingPublisher:
    """Acks and records every message at once, and completes after the last."""

    def __init__(self, messages: int) -> None:
        self.messages = messages
        self.moments: dict[str, int] = {}
        self.complete = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Do nothing: there is nothing to close."""

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        now = time.monotonic_ns()
        for message in batch:
            self.moments[str(message.id)] = now
        if len(self.moments) >= self.messages:
            self.complete.set()
        return [ACKED] * len(batch)


class Arrivals:
    """The running process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def wait(self) -> Mapping[UUID, int]:
        """Wait until all messages have arrived; return when each of them did."""
        out, _ = self._process.communicate()
        if self._process.returncode:
            raise OutboxError(f"the relay ended with {self._process.returncode}")
        return {UUID(id): moment for id, moment in json.loads(out).items()}


@contextmanager
def arrivals(database_url: str, messages: int) -> Iterator[Arrivals]:
    """Start the process, and enter the block once it holds its lanes."""
    command = [sys.executable, "-m", "benchmarks.arrivals", database_url]
    process = subprocess.Popen(
        [*command, str(messages)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != READY:
            raise OutboxError(f"the relay ended with {process.wait()} at its start")
        yield Arrivals(process)
    finally:
        process.kill()
        process.wait()


async def main(database_url: str, messages: int) -> None:
    publisher = NotingPublisher(messages)

    def say_ready(event: Event) -> None:
        if isinstance(event, LeaseTaken) and not publisher.complete.is_set():
            leased.set()

    leased = asyncio.Event()
    relay = Relay(database_url, publisher, observers=[say_ready])
    running = asyncio.create_task(relay.run())
    await leased.wait()
    print(READY, flush=True)
    await publisher.complete.wait()
    relay.stop()
    await running
    print(json.dumps(publisher.moments))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("database_url")
    parser.add_argument("messages", type=int)
    given = parser.parse_args()
    asyncio.run(main(given.database_url, given.messages))
