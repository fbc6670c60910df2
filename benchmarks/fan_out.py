"""What a message costs the server when three consumers read the outbox.

Each consumer reads a backlog whole and acks each message. The consumers do nothing
else: no handlers, no receipts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import timedelta

import psycopg

from benchmarks.conditions import Conditions, show
from benchmarks.fill import fill
from benchmarks.measure import Answer, Variant, measure
from benchmarks.settling import (
    TICKS,
    WRITTEN,
    Costs,
    ended_children,
    parent_of,
    wait_for_sessions,
)
from benchmarks.stall import value
from benchmarks.workload import TOPIC, Workload
from pillarbox.inbox.sources.postgres import PostgresSource
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import add_reader, drop_reader

CONSUMERS = ("billing", "shipping", "reporting")
LIMIT = 256
UNSETTLED = "SELECT count(*) FROM outbox.unsettled_message"
ROOM = """
SELECT sum(pg_total_relation_size(oid)) FROM pg_class
 WHERE relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND relkind = 'r'
"""


def answers(conditions: Conditions) -> Iterator[Answer]:
    workload = Workload(messages=conditions.size(100_000, quick=10_000))
    taken: list[Costs] = []

    def run() -> float:
        taken.append(costs(conditions, workload))
        return taken[-1].wal

    found = measure(
        Variant(label="WAL", run=run),
        runs=conditions.runs(2),
        on_run=lambda label, figure: show(label, figure, "B"),
    )
    cpu = sorted(each.cpu for each in taken)[len(taken) // 2]
    for what, unit, figure in (
        ("WAL a message", "B", found.median),
        ("CPU of backends", "µs", cpu),
    ):
        yield Answer(
            question=f"fan-out to {len(CONSUMERS)}: {what}",
            figure=figure,
            unit=unit,
            noise=found.noise,
            detail=f"{workload.messages:,} messages",
        )


def costs(conditions: Conditions, workload: Workload) -> Costs:
    """Let each consumer read a backlog, and measure that."""
    with (
        conditions.migrated_database() as url,
        psycopg.connect(url, autocommit=True) as connection,
    ):
        connection.execute("ALTER SYSTEM SET autovacuum = off")
        connection.execute("SELECT pg_reload_conf()")
        with administration(url, application_name="benchmark") as administrator:
            drop_reader(administrator, "main")
            for consumer in CONSUMERS:
                add_reader(administrator, consumer, [TOPIC], for_consumer=True)
        fill(url, workload)
        connection.execute("CHECKPOINT")
        wait_for_sessions(connection)
        postmaster = parent_of(connection.info.backend_pid)
        room = value(connection, ROOM)
        wal, cpu = value(connection, WRITTEN), ended_children(postmaster)
        started = time.monotonic()
        for consumer in CONSUMERS:
            asyncio.run(read(url, consumer, workload.messages))
        seconds = time.monotonic() - started
        wait_for_sessions(connection)
        used = (ended_children(postmaster) - cpu) * 1e6 / TICKS
        written = float(value(connection, WRITTEN) - wal)
        if unsettled := value(connection, UNSETTLED):
            raise RuntimeError(f"{unsettled} messages were not settled")
        return Costs(
            wal=written / workload.messages,
            cpu=used / workload.messages,
            growth=float(value(connection, ROOM) / room),
            rate=len(CONSUMERS) * workload.messages / seconds,
        )


async def read(url: str, consumer: str, messages: int) -> None:
    """Read and ack all messages as one consumer."""
    source = PostgresSource(
        url, consumer=consumer, topics=[TOPIC], poll_interval=timedelta(seconds=0.1)
    )
    async with source:
        while messages > 0:
            deliveries = await source.receive(limit=LIMIT)
            await asyncio.gather(*(delivery.ack() for delivery in deliveries))
            messages -= len(deliveries)
