"""Drain a full outbox with a relay in its own process, and measure that process.

`drain` starts the process, which runs `python -m benchmarks.drain`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.fill import unpublished
from benchmarks.null_publisher import NullPublisher
from benchmarks.peers.peer import Peer
from pillarbox.outbox.brokers.plugins import implementation
from pillarbox.outbox.errors import OutboxError
from pillarbox.outbox.events import Event, Observer
from pillarbox.relay.events import BatchSettled
from pillarbox.relay.publisher import Publisher
from pillarbox.relay.relay import Relay

REPOSITORY = Path(__file__).parents[1]
PARTS = 10
NOWHERE = "null"
SHORTEST = 1e-9  # one batch can cover several tenths of a small drain


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """The figures of one drain.

    Attributes:
        messages: how many were settled.
        seconds: from the relay's start to the settling of the last message.
        first: seconds from the relay's start to the settling of the first batch.
        parts: messages per second in each tenth of the drain, in order.
        peak_mib: the highest resident memory of the relay's process.
    """

    messages: int
    seconds: float
    first: float
    parts: tuple[float, ...]
    peak_mib: float

    @property
    def rate(self) -> float:
        """Messages per second over the whole drain."""
        return self.messages / self.seconds


def drain(database_url: str, messages: int, publisher: str = NOWHERE) -> Drained:
    """Run a relay until it has settled `messages`; check that none is left.

    `publisher` is the URL of a broker, or NOWHERE.
    """
    with draining(database_url, messages, publisher) as relay:
        return relay.wait()


class Draining:
    """The relay's process while it runs."""

    def __init__(self, process: subprocess.Popen[str], database_url: str) -> None:
        self._process = process
        self._database_url = database_url

    def wait(self) -> Drained:
        """Wait until all messages are settled, and check that they were published."""
        out, _ = self._process.communicate()
        if self._process.returncode:
            raise OutboxError(f"the relay ended with {self._process.returncode}")
        if left := unpublished(self._database_url):
            raise OutboxError(f"{left} messages were not published")
        outcome = json.loads(out)
        return Drained(**{**outcome, "parts": tuple(outcome["parts"])})


@contextmanager
def draining(
    database_url: str, messages: int, publisher: str, *, peer: Peer | None = None
) -> Iterator[Draining]:
    """Start a relay that ends when it has settled `messages`.

    If `peer` is given, its program runs instead, with its own publisher.
    """
    module, environment = "benchmarks.drain", dict(os.environ)
    if peer is not None:
        module = f"benchmarks.peers.{peer.package}.drain"
        environment["PYTHONPATH"] = str(peer.packages)
    command = [sys.executable, "-m", module, database_url, publisher, str(messages)]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Draining(process, database_url)
    finally:
        process.kill()
        process.wait()


class Progress:
    """Follows a relay's events and stops it after the last message."""

    def __init__(self, messages: int) -> None:
        self.messages = messages
        self.settled = 0
        self.points: list[tuple[int, float]] = []
        self.relay: Relay | None = None

    def __call__(self, event: Event) -> None:
        if not isinstance(event, BatchSettled):
            return
        self.settled += event.published + event.dead_lettered
        self.points.append((self.settled, time.perf_counter()))
        if self.settled >= self.messages and self.relay is not None:
            self.relay.stop()

    def parts(self) -> tuple[float, ...]:
        """Return the rate in each tenth, excluding the time before the first batch."""
        bounds = [self.points[0]]
        for part in range(1, PARTS + 1):
            wanted = self.messages * part / PARTS
            bounds.append(next(point for point in self.points if point[0] >= wanted))
        return tuple(
            (count - before) / max(moment - since, SHORTEST)
            for (before, since), (count, moment) in pairwise(bounds)
        )


async def run(
    database_url: str,
    publisher: Publisher,
    messages: int,
    observers: Iterable[Observer] = (),
) -> Drained:
    progress = Progress(messages)
    relay = Relay(database_url, publisher, observers=[*observers, progress])
    progress.relay = relay
    started = time.perf_counter()
    await relay.run()
    return Drained(
        messages=progress.settled,
        seconds=progress.points[-1][1] - started,
        first=progress.points[0][1] - started,
        parts=progress.parts(),
        peak_mib=peak_mib(),
    )


def peak_mib() -> float:
    """Return the peak memory of this process; getrusage would include its parent's."""
    status = Path("/proc/self/status").read_text()
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    if peak is None:
        raise OutboxError("/proc/self/status has no VmHWM; memory needs Linux")
    return int(peak[1]) / 1024


def publisher_of(url: str) -> Publisher:
    """Return the installed publisher for a broker's URL, or one that does nothing."""
    if url == NOWHERE:
        return NullPublisher()
    publisher: Publisher = implementation("pillarbox.publishers", url)(url)
    return publisher


def main(publisher_of: Callable[[str], Publisher] = publisher_of) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("database_url")
    parser.add_argument("publisher")
    parser.add_argument("messages", type=int)
    given = parser.parse_args()
    drained = asyncio.run(
        run(given.database_url, publisher_of(given.publisher), given.messages)
    )
    print(json.dumps(asdict(drained)))


if __name__ == "__main__":
    main()
