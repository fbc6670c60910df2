"""How long other tenants' messages wait while one tenant's are published.

`python -m benchmarks.others` is the relay's process, which is also measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Self

import psycopg

from benchmarks.drain import REPOSITORY, peak_mib
from pillarbox.outbox.errors import OutboxError
from pillarbox.outbox.events import Event
from pillarbox.outbox.message import Message
from pillarbox.relay.events import LeaseTaken
from pillarbox.relay.publisher import Acked, Confirmation
from pillarbox.relay.relay import Relay

OTHER = "other"
LAST = "last"
PAUSE = 0.02
LANES = 16
ADD = """
INSERT INTO outbox.message (id, lane, topic, key, tenant, content_type, payload)
VALUES (outbox.uuid7(), 16 + %(n)s %% 16, %(topic)s, 'other-' || %(n)s %% 96, 'other',
        'text/plain', convert_to(%(payload)s, 'UTF8'))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """How long the others' messages waited.

    Attributes:
        longest: seconds from just before a message's INSERT to its publishing.
        longest_elsewhere: the same, for messages in the upper half of the lanes.
        late: the 99th percentile of the waiting times of all others' messages.
        middle: the median of those times.
        messages: how many there were.
        not_others: how many other messages were published meanwhile.
        peak_mib: the highest resident memory of the relay's process.
    """

    longest: float
    longest_elsewhere: float
    late: float
    middle: float
    messages: int
    not_others: int
    peak_mib: float


def watch(
    url: str, seconds: float, meanwhile: Callable[[], None] = lambda: None
) -> Waited:
    """Start a relay and add others' messages one by one.

    This lasts for at least `seconds`, and until `meanwhile` returns, which runs in
    another thread.
    """
    with (
        relaying(url) as relay,
        psycopg.connect(url, autocommit=True) as connection,
        ThreadPoolExecutor(1) as thread,
    ):
        assert relay.stdout is not None
        relay.stdout.readline()  # it holds its lanes
        end = time.monotonic() + seconds
        running = thread.submit(meanwhile)
        number = 0
        while time.monotonic() < end or not running.done():
            add(connection, number, OTHER)
            number += 1
            time.sleep(PAUSE)
        running.result()
        add(connection, number, LAST)
        out, _ = relay.communicate()
        if relay.returncode:
            raise OutboxError(f"the relay ended with {relay.returncode}")
    return Waited(**json.loads(out.splitlines()[-1]))


def add(connection: psycopg.Connection[tuple[object, ...]], n: int, topic: str) -> None:
    payload = f"{n} {time.time()}"
    connection.execute(ADD, {"n": n, "topic": topic, "payload": payload})


@contextmanager
def relaying(url: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.others", url],
        cwd=REPOSITORY,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Watch:
    """A publisher that acks at once and records how long others' messages waited."""

    def __init__(self) -> None:
        self.waited: list[float] = []
        self.waited_elsewhere: list[float] = []
        self.not_others = 0
        self.last = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Do nothing: there is nothing to close."""

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        now = time.time()
        for message in batch:
            if message.topic == OTHER:
                number, moment = message.payload.split()
                self.waited.append(now - float(moment))
                if int(number) % LANES >= LANES // 2:
                    self.waited_elsewhere.append(now - float(moment))
            elif message.topic == LAST:
                self.last.set()
            else:
                self.not_others += 1
        return [Acked()] * len(batch)


def tell_start(event: Event) -> None:
    if isinstance(event, LeaseTaken):
        print("started", flush=True)


async def run(url: str) -> Waited:
    publisher = Watch()
    relay = Relay(url, publisher, observers=[tell_start])
    running = asyncio.create_task(relay.run())
    await publisher.last.wait()
    relay.stop()
    await running
    return Waited(
        longest=max(publisher.waited),
        longest_elsewhere=max(publisher.waited_elsewhere),
        late=quantiles(publisher.waited, n=100)[-1],
        middle=median(publisher.waited),
        messages=len(publisher.waited),
        not_others=publisher.not_others,
        peak_mib=peak_mib(),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("database_url")
    waited = asyncio.run(run(parser.parse_args().database_url))
    print(json.dumps(asdict(waited)))


if __name__ == "__main__":
    main()
