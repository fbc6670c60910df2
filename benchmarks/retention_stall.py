"""How long writers wait while old days are dropped and somebody's transaction is open.

A session that is idle in a transaction has read the table. pg_partman's own drop asks
for an exclusive lock on it, and every writer queues behind that request.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg

from benchmarks import pgbench
from benchmarks.conditions import Conditions, show
from benchmarks.measure import Answer, Variant, at_most, measure
from outbox.errors import OutboxError
from outbox.upkeep import APPLICATION_NAME, maintain

WRITERS = 8
EXPIRED_DAYS = 3
LONGEST_STALL = 50
LEAD = 2
"""Seconds for which the writers run before the upkeep begins, and after the reader."""

INSERT = """
INSERT INTO outbox.message (id, lane, topic, key, content_type, payload)
VALUES (gen_random_uuid(), 16, 'orders.placed', 'order-1', 'text/plain', 'x');
"""
MAKE_EXPIRED = """
SELECT partman.create_partition_time('outbox.message', (
    SELECT array_agg(date_trunc('day', now(), 'UTC') - (20 + day) * interval '1 day')
      FROM generate_series(1, %(days)s) AS day))
"""
FILL_EXPIRED = """
INSERT INTO outbox.message
       (id, created_at, published_at, lane, topic, content_type, payload)
SELECT gen_random_uuid(), moment, moment, 16, 'orders.placed', 'text/plain', 'x'
  FROM generate_series(1, %(days)s) AS day, generate_series(1, 1000),
       LATERAL (SELECT date_trunc('day', now(), 'UTC') - (20 + day) * interval '1 day')
               AS settled (moment)
"""
COUNT_EXPIRED = """
SELECT count(*) FROM outbox.partitions('outbox.message')
 WHERE ends_at < now() - interval '10 days'
"""
PARTMAN_DROP = """
SELECT partman.drop_partition_time(
    'outbox.message', p_retention => '7 days', p_keep_table => false)
"""


def answers(conditions: Conditions) -> Iterator[Answer]:
    idle = conditions.size(60, quick=10)
    ours, partman, none = (
        Variant(label=label, run=longest_stall(conditions, upkeep, idle))
        for label, upkeep in (
            ("ours", our_drop),
            ("pg_partman's drop", partman_drop),
            ("no drop", no_drop),
        )
    )
    found = measure(
        ours,
        partman,
        none,
        runs=1,
        on_run=lambda label, figure: show(label, figure, "ms"),
    )
    yield Answer(
        question=f"retention: longest insert beside a reader idle for {idle} s",
        figure=max(*found.subject.figures, *found.again.figures),
        unit="ms",
        target=at_most(LONGEST_STALL),
        noise=found.noise,
        detail=f"{WRITERS} writers, {EXPIRED_DAYS} days dropped: {found.medians('ms')}",
    )


def longest_stall(
    conditions: Conditions, upkeep: Callable[[psycopg.Connection], None], idle: int
) -> Callable[[], float]:
    def run() -> float:
        with conditions.migrated_database() as url:
            with psycopg.connect(url) as connection:
                connection.execute("SET timezone = 'UTC'")
                connection.execute("SET ROLE pillarbox_owner")
                connection.execute(MAKE_EXPIRED, {"days": EXPIRED_DAYS})
                connection.execute(FILL_EXPIRED, {"days": EXPIRED_DAYS})
            return milliseconds(url, upkeep, idle)

    return run


def milliseconds(
    url: str, upkeep: Callable[[psycopg.Connection], None], idle: int
) -> float:
    """The longest insert while the upkeep meets an open transaction."""
    with (
        TemporaryDirectory() as directory,
        psycopg.connect(
            url, autocommit=True, application_name=APPLICATION_NAME
        ) as keeper,
        psycopg.connect(url) as reader,
    ):
        writers = write(url, Path(directory), seconds=idle + 2 * LEAD)
        time.sleep(LEAD)
        reader.execute("SELECT count(*) FROM outbox.message")
        keeping = threading.Thread(target=upkeep, args=(keeper,))
        keeping.start()
        time.sleep(idle)
        reader.rollback()
        keeping.join()
        _, errors = writers.communicate()
        if writers.returncode:
            raise OutboxError(f"pgbench ended with {writers.returncode}: {errors}")
        if upkeep is not no_drop:
            left = keeper.execute(COUNT_EXPIRED).fetchone()
            assert left == (0,), f"{left} expired partitions are still there"
        return longest(Path(directory))


def write(url: str, directory: Path, *, seconds: int) -> subprocess.Popen[str]:
    """Start writers that log how long each insert took."""
    script = directory / "insert.sql"
    script.write_text(INSERT)
    return subprocess.Popen(
        [
            pgbench.program(),
            *("--no-vacuum", "--protocol=prepared", "--log", "--log-prefix=took"),
            *(f"--client={WRITERS}", f"--time={seconds}", f"--file={script}", url),
        ],
        cwd=directory,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def longest(directory: Path) -> float:
    """Milliseconds of the longest transaction in pgbench's log."""
    took = [
        int(line.split()[2])
        for log in directory.glob("took.*")
        for line in log.read_text().splitlines()
    ]
    return max(took) / 1000


def our_drop(connection: psycopg.Connection) -> None:
    maintain(connection, tell=lambda _: None)
    # What could not be dropped while the reader held it, the next hour's run drops.
    maintain(connection, tell=lambda _: None)


def partman_drop(connection: psycopg.Connection) -> None:
    connection.execute("SET timezone = 'UTC'")
    connection.execute(PARTMAN_DROP)


def no_drop(connection: psycopg.Connection) -> None:
    """Show how long an insert takes at worst on this machine, without a cause."""
