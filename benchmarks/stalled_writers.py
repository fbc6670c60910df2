"""Writers whose longest wait is measured, and control writers.

The same number of control writers insert at the same rate into a table that nothing
else uses. If both kinds wait at the same moment, the machine is the cause, not a lock.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psycopg

from benchmarks import pgbench
from pillarbox.outbox.errors import OutboxError

WRITERS = 8
RATE = 1_000
"""Inserts per second of all writers of a table together.

Without a limit, and with commits that wait for the disk, the longest insert takes 50 to
80 ms on two cores even if nothing is dropped.
"""
UNHINDERED = "-c synchronous_commit=off"
SHORT = 1.0
CONTROL = "CREATE TABLE IF NOT EXISTS bench_control (id uuid PRIMARY KEY, payload text)"
INSERTS = {
    "table": """
INSERT INTO outbox.message (id, lane, topic, key, content_type, payload)
VALUES (gen_random_uuid(), 16, 'orders.placed', 'order-1', 'text/plain', 'x');
""",
    "control": "INSERT INTO bench_control VALUES (gen_random_uuid(), 'x');",
}


class Insert(NamedTuple):
    """When an insert was due to begin and when it ended, in seconds since 1970."""

    began: float
    ended: float

    @property
    def milliseconds(self) -> float:
        """How long it took, including any delay of its writer."""
        return (self.ended - self.began) * 1_000


class Writers:
    """Writers that start when they are created, and write for `seconds`."""

    def __init__(self, url: str, directory: Path, *, seconds: int) -> None:
        self._directory = directory
        with psycopg.connect(url) as connection:
            connection.execute(CONTROL)
        self._running = [self._start(url, name, seconds=seconds) for name in INSERTS]

    @property
    def at_work(self) -> bool:
        """Whether all writers are still running."""
        return all(each.poll() is None for each in self._running)

    def kill(self) -> None:
        """Kill all writers."""
        for each in self._running:
            each.kill()
            each.wait()

    def finish(self) -> None:
        """Wait until all writers have ended."""
        for each in self._running:
            _, errors = each.communicate()
            if each.returncode:
                raise OutboxError(f"pgbench ended with {each.returncode}: {errors}")

    def longest_stall(self, began: float, ended: float) -> float:
        """Return the longest stall of inserts that ended in this time, in milliseconds.

        The stall of an insert is the time by which it exceeds all concurrent controls.
        """
        control = [each for each in self._inserts("control") if _is_long(each)]
        longest = 0.0
        for each in sorted(self._inserts("table"), key=_length, reverse=True):
            if each.milliseconds <= longest:
                break
            if began <= each.ended <= ended:
                concurrent = [c.milliseconds for c in control if _overlap(each, c)]
                longest = max(longest, each.milliseconds - max(concurrent, default=0.0))
        return longest

    def _start(self, url: str, name: str, *, seconds: int) -> subprocess.Popen[str]:
        script = self._directory / f"{name}.sql"
        script.write_text(INSERTS[name])
        return subprocess.Popen(
            [
                pgbench.program(),
                *("--no-vacuum", "--protocol=prepared"),
                *("--log", f"--log-prefix={name}"),
                *(f"--client={WRITERS}", f"--rate={RATE}", f"--time={seconds}"),
                *(f"--file={script}", url),
            ],
            cwd=self._directory,
            env={**os.environ, "PGOPTIONS": UNHINDERED},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _inserts(self, name: str) -> Iterator[Insert]:
        for log in self._directory.glob(f"{name}.*"):
            if log.suffix == ".sql":
                continue
            for line in log.read_text().splitlines():
                _, _, microseconds, _, second, fraction, _ = line.split()
                ended = int(second) + int(fraction) / 1e6
                yield Insert(ended - int(microseconds) / 1e6, ended)


def _length(insert: Insert) -> float:
    return insert.milliseconds


def _is_long(insert: Insert) -> bool:
    return insert.milliseconds > SHORT


def _overlap(one: Insert, other: Insert) -> bool:
    return one.began < other.ended and other.began < one.ended
