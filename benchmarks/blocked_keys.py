"""How long others wait while one tenant has a million blocked keys.

`python -m benchmarks.blocked_keys` is the relay's process, which is measured too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Self

import psycopg

from benchmarks.conditions import Conditions, show
from benchmarks.drain import REPOSITORY, peak_mib
from benchmarks.measure import Answer, at_most
from outbox.errors import OutboxError
from outbox.events import Event
from outbox.message import Message
from relay.events import LeaseTaken
from relay.publisher import Acked, Confirmation
from relay.relay import Relay

OTHER = "other"
LAST = "last"
LONGEST_WAIT = 1.0
MOST_MIB = 256.0
PAUSE = 0.02
# Each key has a refused message that waits, one in ten has another behind it.
FILL = """
INSERT INTO outbox.message (id, lane, topic, key, tenant, content_type, payload, attempts, available_at)
SELECT outbox.uuid7(), 16 + n %% 16, 'blocked', 'k' || n, 'noisy', 'text/plain', '', i,
       CASE WHEN i = 1 THEN now() + CAST(%(due)s AS interval) END
  FROM generate_series(1, %(keys)s) AS n, generate_series(1, 0, -1) AS i
 WHERE i = 1 OR n %% 10 = 0
"""  # noqa: E501
ADD = """
INSERT INTO outbox.message (id, lane, topic, key, tenant, content_type, payload)
VALUES (outbox.uuid7(), 16 + %(n)s %% 16, %(topic)s, 'other-' || %(n)s %% 96, 'other',
        'text/plain', convert_to(%(moment)s, 'UTF8'))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """What the others' messages met with.

    Attributes:
        longest: seconds from a message's commit to its publishing.
        middle: the median of these.
        messages: how many there were.
        unblocked: messages of the blocked keys that were published meanwhile.
        peak_mib: the highest resident memory of the relay's process.
    """

    longest: float
    middle: float
    messages: int
    unblocked: int
    peak_mib: float


def answers(conditions: Conditions) -> Iterator[Answer]:
    keys = conditions.size(1_000_000, quick=50_000)
    seconds = conditions.size(60, quick=10)
    for label, due in (("wait", "6 hours"), ("are due all at once", "0 s")):
        with conditions.migrated_database() as url:
            fill(url, keys, due)
            found = watch(url, seconds)
        show(f"{keys:,} keys that {label}", found.longest, "s")
        detail = (
            f"{found.messages:,} messages of others, median {found.middle:.3f} s; "
            f"{found.unblocked:,} of these keys published meanwhile"
        )
        yield Answer(
            question=f"longest wait beside {keys:,} blocked keys that {label}",
            figure=found.longest,
            unit=" s",
            target=at_most(LONGEST_WAIT),
            detail=detail,
        )
        yield Answer(
            question=f"memory of that relay, {label}",
            figure=found.peak_mib,
            unit=" MiB",
            target=at_most(MOST_MIB),
            detail="resident memory at its highest",
        )


def fill(url: str, keys: int, due: str) -> None:
    """Add the blocked keys, and vacuum as autovacuum would."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(FILL, {"keys": keys, "due": due})
        connection.execute("VACUUM ANALYZE outbox.message")


def watch(url: str, seconds: float) -> Waited:
    """Start a relay and add others' messages for a while, one by one."""
    with relaying(url) as relay, psycopg.connect(url, autocommit=True) as connection:
        assert relay.stdout is not None
        relay.stdout.readline()  # it has its lanes
        end = time.monotonic() + seconds
        number = 0
        while time.monotonic() < end:
            add(connection, number, OTHER)
            number += 1
            time.sleep(PAUSE)
        add(connection, number, LAST)
        out, _ = relay.communicate()
        if relay.returncode:
            raise OutboxError(f"the relay ended with {relay.returncode}")
    return Waited(**json.loads(out.splitlines()[-1]))


def add(connection: psycopg.Connection[tuple[object, ...]], n: int, topic: str) -> None:
    connection.execute(ADD, {"n": n, "topic": topic, "moment": str(time.time())})


@contextmanager
def relaying(url: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.blocked_keys", url],
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
    """A publisher that acks at once and notes how long others' messages waited."""

    def __init__(self) -> None:
        self.waited: list[float] = []
        self.unblocked = 0
        self.last = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """There is nothing to leave."""

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        now = time.time()
        for message in batch:
            if message.topic == OTHER:
                self.waited.append(now - float(message.payload))
            elif message.topic == LAST:
                self.last.set()
            else:
                self.unblocked += 1
        return [Acked()] * len(batch)


def tell_start(event: Event) -> None:
    if isinstance(event, LeaseTaken):
        print("started", flush=True)


async def run(url: str) -> Waited:
    publisher = Watch()
    relay = Relay(url, publisher, observers=[tell_start], name="benchmark")
    running = asyncio.create_task(relay.run())
    await publisher.last.wait()
    relay.stop()
    await running
    return Waited(
        longest=max(publisher.waited),
        middle=median(publisher.waited),
        messages=len(publisher.waited),
        unblocked=publisher.unblocked,
        peak_mib=peak_mib(),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("database_url")
    waited = asyncio.run(run(parser.parse_args().database_url))
    print(json.dumps(asdict(waited)))


if __name__ == "__main__":
    main()
