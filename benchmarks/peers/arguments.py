"""The arguments of every peer's driver, and the one line that it prints.

It uses only the standard library, since it runs in the peers' own environments.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from benchmarks.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The peer's own database, the messages to drain, and their destination.

    Without a broker, the destination is a handler that does nothing.
    """

    database_url: str
    workload: Workload
    broker_url: str | None = None


def parse(description: str) -> Task:
    """Read the task from the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--database-url", required=True)
    parser.add_argument("--messages", type=int, required=True)
    parser.add_argument("--payload-bytes", type=int, default=300)
    parser.add_argument("--keys", type=int, default=1_000)
    parser.add_argument("--broker-url")
    given = parser.parse_args()
    workload = Workload(
        messages=given.messages, payload_bytes=given.payload_bytes, keys=given.keys
    )
    return Task(
        database_url=given.database_url,
        workload=workload,
        broker_url=given.broker_url,
    )


def report(*, messages: int, seconds: float, left: int) -> None:
    """Print the outcome; exit with an error if the table isn't empty."""
    if left:
        raise SystemExit(f"{left} of {messages} messages were left in the table")
    print(json.dumps({"messages": messages, "seconds": seconds}))
