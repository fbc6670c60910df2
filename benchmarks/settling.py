"""What claiming and settling cost the server: WAL, processor time, disk space.

The publisher does nothing and autovacuum is off, so only the relay's own statements
count. A checkpoint comes first, so that full-page images are included.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg

from benchmarks.conditions import Conditions, show
from benchmarks.drain import drain
from benchmarks.fill import fill
from benchmarks.measure import Answer, Target, Variant, at_most, measure
from benchmarks.stall import value
from benchmarks.workload import Workload

MESSAGES = {300: 100_000, 1_000: 100_000, 8_000: 20_000}
MOST_WAL = 250.0
TICKS = os.sysconf("SC_CLK_TCK")
WRITTEN = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
# The tables of messages and their positions and deferrals; not the inbox.
ROOM = """
SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c
 WHERE c.relnamespace = 'outbox'::regnamespace AND c.relkind = 'r'
"""
SESSIONS = """
SELECT count(*) FROM pg_stat_activity
 WHERE application_name LIKE 'pillarbox %' OR backend_type = 'autovacuum worker'
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one message cost.

    Attributes:
        wal: bytes of write-ahead log.
        cpu: microseconds of processor time of the relay's backends.
        growth: the size of the tables afterwards, divided by their size before.
        rate: messages per second.
    """

    wal: float
    cpu: float
    growth: float
    rate: float


def answers(conditions: Conditions) -> Iterator[Answer]:
    for payload_bytes, messages in MESSAGES.items():
        workload = Workload(
            messages=conditions.size(messages, quick=40_000),
            payload_bytes=payload_bytes,
        )
        taken: list[Costs] = []
        found = measure(
            Variant(label="WAL", run=run_once(conditions, workload, taken)),
            runs=conditions.runs(2),
            on_run=lambda label, figure: show(label, figure, "B"),
        )
        name = f"{workload.messages:,} messages of {payload_bytes:,} B"
        steps: tuple[tuple[str, str, float, Target | None], ...] = (
            ("WAL a message", "B", found.median, at_most(MOST_WAL)),
            ("CPU of backends", "µs", median_of(c.cpu for c in taken), None),
            ("room settled/live", "x", median_of(c.growth for c in taken), None),
        )
        for what, unit, figure, target in steps:
            yield Answer(
                question=f"settling {name}: {what}",
                figure=figure,
                unit=unit,
                target=target,
                noise=found.noise,
                detail=f"{median_of(c.rate for c in taken):,.0f} messages/s",
            )


def median_of(figures: Iterator[float]) -> float:
    ordered = sorted(figures)
    return ordered[len(ordered) // 2]


def run_once(
    conditions: Conditions, workload: Workload, taken: list[Costs]
) -> Callable[[], float]:
    def run() -> float:
        taken.append(costs(conditions, workload))
        return taken[-1].wal

    return run


def costs(conditions: Conditions, workload: Workload) -> Costs:
    """Fill a new database, drain it, and measure the costs."""
    with (
        conditions.migrated_database() as url,
        psycopg.connect(url, autocommit=True) as connection,
    ):
        connection.execute("ALTER SYSTEM SET autovacuum = off")
        connection.execute("SELECT pg_reload_conf()")
        fill(url, workload)
        connection.execute("CHECKPOINT")
        wait_for_sessions(connection)
        postmaster = parent_of(connection.info.backend_pid)
        room = value(connection, ROOM)
        wal, cpu = value(connection, WRITTEN), ended_children(postmaster)
        rate = drain(url, workload.messages).rate
        wait_for_sessions(connection)
        return Costs(
            wal=float(value(connection, WRITTEN) - wal) / workload.messages,
            cpu=(ended_children(postmaster) - cpu) * 1e6 / TICKS / workload.messages,
            growth=float(value(connection, ROOM) / room),
            rate=rate,
        )


def wait_for_sessions(connection: psycopg.Connection) -> None:
    """Wait until all other backends of ours have exited: then their time is counted."""
    while value(connection, SESSIONS):
        time.sleep(0.05)


def parent_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^PPid:\s+(\d+)$", status, re.MULTILINE)
    assert found is not None
    return int(found[1])


def ended_children(pid: int) -> int:
    """Return the processor time of a process's finished children, in ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[13]) + int(fields[14])
