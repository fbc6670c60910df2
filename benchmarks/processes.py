"""How many messages two processes of a consumer handle, against one.

`pillarbox consume --processes` runs `make`, whose handler does what many do: it reads
its payload, computes for a few milliseconds in Python, and inserts a row. The server
shares the processors with the processes, so two of them can't be twice as fast.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from decimal import Decimal

import psycopg
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from benchmarks.conditions import Conditions, show
from benchmarks.consuming import CONNECTIONS, NAME
from benchmarks.drain import REPOSITORY
from benchmarks.measure import Answer, Variant, at_least, measure
from benchmarks.way import connected, write
from benchmarks.workload import TOPIC
from pillarbox.inbox.consumer import Consumer
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import add_reader
from pillarbox.outbox.errors import OutboxError
from pillarbox.outbox.message import Message
from pillarbox.outbox.postgres.connection import sqlalchemy_url

URL_VARIABLE = "BENCHMARK_URL"
LINES = 4_000
"""Of an invoice: the handler adds them up, which takes about two milliseconds."""
WARM_UP = 100
POLL = 0.05
TABLE = "CREATE TABLE effect (id uuid, pid int NOT NULL, total numeric NOT NULL)"
EFFECT = text("INSERT INTO effect VALUES (:id, :pid, :total)")
HANDLED = "SELECT count(*), count(DISTINCT pid) FROM effect"


def answers(conditions: Conditions) -> Iterator[Answer]:
    messages = conditions.size(5_000, quick=1_500)
    one, two = (
        Variant(
            label=f"{count} process{'es' if count > 1 else ''}",
            run=lambda count=count: rate(conditions, count, messages),  # type: ignore[misc]
        )
        for count in (1, 2)
    )
    found = measure(
        two,
        one,
        runs=conditions.runs(5),
        on_run=lambda label, figure: show(label, figure, "/s"),
    )
    yield Answer(
        question="consumer: two processes against one",
        figure=found.ratio(one.label),
        target=at_least(1.6) if (os.cpu_count() or 1) > 1 else None,
        noise=found.noise,
        detail=f"{messages:,} messages: {found.medians('/s')}",
    )


def rate(conditions: Conditions, count: int, messages: int) -> float:
    """Return how many messages of a backlog the processes handle in a second."""
    with conditions.migrated_database() as url, tempfile.TemporaryFile() as log:
        with psycopg.connect(url) as connection:
            connection.execute(TABLE)
        with administration(url, application_name=NAME) as administered:
            add_reader(administered, NAME, [TOPIC], for_consumer=True)
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pillarbox", "consume"),
                *("benchmarks.processes:make", "--processes", str(count)),
            ],
            cwd=REPOSITORY,
            env={**os.environ, URL_VARIABLE: url},
            stderr=log,
        )
        try:
            with connected(url) as connection:
                written = 0
                while _handled(connection, process) != (written, count):
                    write(connection, WARM_UP)
                    written += WARM_UP
                    while _handled(connection, process)[0] < written:
                        time.sleep(POLL)
                started = time.perf_counter()
                write(connection, messages)
                while _handled(connection, process)[0] < written + messages:
                    time.sleep(POLL)
                return messages / (time.perf_counter() - started)
        finally:
            process.terminate()
            process.wait()


def _handled(
    connection: psycopg.Connection, process: subprocess.Popen[bytes]
) -> tuple[int, int]:
    """Return how many messages have been handled, and by how many processes."""
    if process.poll() is not None:
        raise OutboxError(f"the consumer ended with {process.returncode}")
    row = connection.execute(HANDLED).fetchone()
    assert row is not None
    return row[0], row[1]


def make() -> Consumer:
    url = os.environ[URL_VARIABLE]
    engine = create_async_engine(sqlalchemy_url(url), pool_size=CONNECTIONS)
    consumer = Consumer(url, async_sessionmaker(engine), name=NAME)
    consumer.handles(TOPIC)(handle)
    return consumer


async def handle(session: AsyncSession, message: Message) -> None:
    order = message.json()["order_id"]
    lines = (Decimal(line % 100) / 4 for line in range(LINES))
    total = sum(lines, Decimal(order))
    values = {"id": message.id, "pid": os.getpid(), "total": total}
    await session.execute(EFFECT, values)
