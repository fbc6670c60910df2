"""What the guard costs the transaction of a handler that writes one row.

A test asserts that the guard adds one statement; this measures the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import psycopg
from psycopg import sql
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from benchmarks.conditions import Conditions, show
from benchmarks.measure import Answer, Variant, at_most, measure
from benchmarks.workload import TOPIC, payload
from pillarbox.inbox.idempotent import idempotent
from pillarbox.outbox.message import Message
from pillarbox.outbox.postgres.connection import sqlalchemy_url

Handler: TypeAlias = Callable[[Session, Message], object]

WARM_UP = 100
MANY = 90
PAYLOAD = payload(1, 300)
TABLE = "CREATE TABLE effect (id bigserial PRIMARY KEY, payload bytea NOT NULL)"
EFFECT = text("INSERT INTO effect (payload) VALUES (:payload)")
OTHER_DAYS = """
SELECT partition::text FROM outbox.partitions('inbox.receipt')
 WHERE NOT (starts_at <= now() AND now() < ends_at)
"""
MAKE_DAYS_BEFORE = """
SELECT partman.create_partition_time(
    p_parent_table := 'inbox.receipt',
    p_partition_times := (
        SELECT array_agg(date_trunc('day', now(), 'UTC') - day * interval '1 day')
          FROM generate_series(1, %(days)s) AS day))
"""
COUNT = "SELECT count(*) FROM outbox.partitions('inbox.receipt')"


def handle(session: Session, message: Message) -> None:
    session.execute(EFFECT, {"payload": message.payload})


guarded = idempotent(consumer="benchmark")(handle)


def answers(conditions: Conditions) -> Iterator[Answer]:
    transactions = conditions.size(250, quick=100)

    def on_run(label: str, figure: float) -> None:
        show(label, figure, "ms")

    with database(conditions, 1) as one, database(conditions, MANY) as many:
        found = measure(
            Variant(label="with", run=milliseconds(many, guarded, transactions)),
            Variant(label="without", run=milliseconds(many, handle, transactions)),
            Variant(label="1 day", run=milliseconds(one, guarded, transactions)),
            runs=conditions.runs(25),
            on_run=on_run,
        )
    yield Answer(
        question="guard: a handler that writes one row, with it against without",
        figure=found.ratio("without"),
        target=at_most(1.5),
        noise=found.noise,
        detail=f"a transaction, {MANY} partitions: {found.medians('ms')}",
    )
    yield Answer(
        question=f"guard: {MANY} partitions against 1",
        figure=found.ratio("1 day"),
        target=at_most(1.1),
        noise=found.noise,
        detail=f"a transaction with the guard: {found.medians('ms')}",
    )


@contextmanager
def database(
    conditions: Conditions, partitions: int
) -> Iterator[sessionmaker[Session]]:
    """Yield sessions of a database whose receipts have this many partitions."""
    with conditions.migrated_database() as url:
        with psycopg.connect(url) as connection:
            connection.execute(TABLE)
            set_partitions(connection, partitions)
        engine = create_engine(sqlalchemy_url(url))
        try:
            yield sessionmaker(engine)
        finally:
            engine.dispose()


def set_partitions(connection: psycopg.Connection, wanted: int) -> None:
    """Keep today, and create days before it until there are as many as wanted."""
    connection.execute("SET timezone = 'UTC'")
    for (other,) in connection.execute(OTHER_DAYS).fetchall():
        connection.execute(sql.SQL("DROP TABLE {}").format(sql.SQL(other)))
    if wanted > 1:
        connection.execute(MAKE_DAYS_BEFORE, {"days": wanted - 1})
    assert connection.execute(COUNT).fetchone() == (wanted,)


def milliseconds(
    sessions: sessionmaker[Session], handler: Handler, transactions: int
) -> Callable[[], float]:
    """Handle messages one after the other; measure the mean time of one."""

    def run_transactions(count: int) -> None:
        for _ in range(count):
            message = Message(TOPIC, PAYLOAD)
            with sessions.begin() as session:
                handler(session, message)

    def run() -> float:
        started = time.perf_counter()
        run_transactions(transactions)
        return (time.perf_counter() - started) * 1_000 / transactions

    run_transactions(WARM_UP)
    return run
