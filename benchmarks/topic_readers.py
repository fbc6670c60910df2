"""What readers of topics cost when no reader gets everything.

`main` was dropped long ago. Of five readers, three share most of the messages, one gets
one in a hundred, and one none; all have read everything. There is a day with millions
of messages, 89 with a few, and today with messages that are scheduled for tomorrow.
Then there are 50 readers, the others of topics of their own.

Blocks are those that a statement found in shared buffers or read, as EXPLAIN counts
them: another figure than the time, which doesn't depend on what else the machine does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple

import psycopg

from benchmarks import pgbench
from benchmarks.conditions import Conditions, show
from benchmarks.history import Day, days_of, make_days
from benchmarks.measure import Answer, at_least, at_most
from benchmarks.scale import POLICY
from benchmarks.stall import value
from benchmarks.status import holding_lanes, reading
from pillarbox.inbox.sources.postgres.outbox_source import PostgresSource
from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.doctor import (
    OF_PROCESSES,
    examine_quickly,
    find_quickly,
)
from pillarbox.outbox.brokers.options import DIRECT
from pillarbox.outbox.observability.database_measure import RELAY
from pillarbox.outbox.observability.overview import read_overview

READERS = {
    "orders": "orders.*",
    "invoices": "invoices",
    "payments": "payments.*",
    "rare": "rare",
    "idle": "idle.*",
}
MANY = 50
DAYS = 90
ROWS_A_DAY = 500
RARE = 0.01
DROP_MAIN = """
UPDATE outbox.subscription SET created_at = now() - interval '200 days',
       ended_at = now() - interval '100 days' WHERE reader = 'main'
"""
ADD_READER = "INSERT INTO outbox.reader (reader, broker) VALUES (%s, %s)"
SUBSCRIBE = "INSERT INTO outbox.subscription (reader, topic) VALUES (%s, %s)"
# One message in a hundred is rare; the three others share the rest.
TOPIC_OF_ROW = """
CASE WHEN number %% 100 = 7 THEN 'rare'
     ELSE (ARRAY['orders.placed', 'invoices', 'payments.made'])[1 + number %% 3] END
"""
FILL = f"""
INSERT INTO outbox.message (id, created_at, lane, topic, key, content_type, payload,
                            available_at)
SELECT outbox.uuid7(), %(begin)s::timestamptz + number * %(step)s::interval,
       16 + number %% 16, {TOPIC_OF_ROW}, 'order-' || number %% 1000, 'text/plain',
       convert_to(rpad(number::text, 100, 'x'), 'UTF8'), %(due)s
  FROM generate_series(1, %(rows)s) AS number
"""
# Batches of about 500 messages of a lane, and of a lane's last messages, too.
SETTLE = """
INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages, lane,
                               reader, snapshot, next_xid)
SELECT %(begin)s, %(end)s, b.up_to, b.up_to,
       CASE s.reader WHEN 'idle' THEN 0 WHEN 'rare' THEN b.messages / 100
                     ELSE b.messages / 3 END,
       b.lane, s.reader, pg_current_snapshot(),
       pg_snapshot_xmax(pg_current_snapshot())
  FROM (SELECT m.lane, max(m.seq) AS up_to, count(*) AS messages
          FROM outbox.message AS m
         WHERE m.created_at >= %(begin)s AND m.created_at < %(end)s
         GROUP BY m.lane, m.seq / 8000) AS b
 CROSS JOIN (SELECT s.reader FROM outbox.subscription AS s
              WHERE s.reader = ANY (%(readers)s)) AS s
"""
DEFER = """
INSERT INTO outbox.deferral (created_at, seq, id, lane, cause, due_at, reader)
SELECT m.created_at, m.seq, m.id, m.lane, 'scheduled', m.available_at, s.reader
  FROM outbox.message AS m
  JOIN outbox.subscription AS s
    ON s.ended_at IS NULL AND outbox.includes(s, m.topic, m.seq, m.xid, -1)
 WHERE m.available_at IS NOT NULL
"""
SUMMARIZE = """
SELECT brin_summarize_new_values(inhrelid) FROM pg_inherits
 WHERE inhparent = 'outbox.message_xid_idx'::regclass
"""
DAY = """
SELECT partition::text, starts_at, ends_at FROM outbox.partitions(%s)
 WHERE starts_at <= now() - interval '1 day' AND now() - interval '1 day' < ends_at
"""
GATE = "SELECT FROM outbox.unsettled_messages(%s::regclass, %s, %s)"
UNSETTLED = "SELECT FROM outbox.unsettled_message"
UNROUTED = "SELECT FROM outbox.unrouted_messages()"
RINGS = """
SELECT coalesce(sum(calls), 0) FROM pg_stat_user_functions
 WHERE funcname = 'ring_doorbell'
"""
# Only messages with a UUIDv7 are handled.
TRANSACTION = pgbench.TRANSACTION.replace("gen_random_uuid()", "outbox.uuid7()")


class Cost(NamedTuple):
    """What a statement cost."""

    milliseconds: float
    blocks: float
    found: int


def answers(conditions: Conditions) -> Iterator[Answer]:
    rows = conditions.size(5_000_000, quick=100_000)
    waiting = conditions.size(1_000_000, quick=20_000)
    with prepared(conditions, rows, waiting) as url:
        yield from gate(conditions, url, rows)
        yield from looks(conditions, url, f"{waiting:,} wait, 5 readers")
        add_readers(url)
        yield from looks(conditions, url, f"{waiting:,} wait, {MANY} readers")
    yield from running(conditions)


@contextmanager
def prepared(conditions: Conditions, rows: int, waiting: int) -> Iterator[str]:
    """Yield a database with a large day, small days, and messages that wait."""
    with conditions.migrated_database() as url:
        prepare(url, rows, waiting)
        yield url


def prepare(url: str, rows: int, waiting: int) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET timezone = 'UTC'")
        connection.execute("SET synchronous_commit = off")
        connection.execute("SET jit = off")
        connection.execute(POLICY, (6,))
        make_days(connection, "outbox.message", newest=1, oldest=DAYS - 7)
        # As for readers that were added to a running system.
        connection.execute("SELECT nextval('outbox.message_seq')")
        connection.execute(DROP_MAIN)
        subscribe(connection, READERS)
        # Oldest first, as they were added.
        for number, day in reversed(
            [*enumerate(days_of(connection, "outbox.message"))]
        ):
            fill(connection, day, rows if number == 1 else ROWS_A_DAY)
        (today, *_) = days_of(connection, "outbox.message")
        fill(connection, today, waiting, due="1 day")
        connection.execute(SUMMARIZE)
        connection.execute("VACUUM (ANALYZE) outbox.message")
        settle(connection, list(READERS))
        connection.execute(DEFER)
        connection.execute("VACUUM (ANALYZE) outbox.deferral")


def subscribe(connection: psycopg.Connection[Any], readers: dict[str, str]) -> None:
    for reader, topic in readers.items():
        connection.execute(ADD_READER, (reader, DIRECT))
        connection.execute(SUBSCRIBE, (reader, topic))


def add_readers(url: str) -> None:
    """Add readers up to 50, which have read everything, too."""
    names = [f"other-{number}" for number in range(MANY - len(READERS))]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET timezone = 'UTC'")
        connection.execute("SET jit = off")
        subscribe(connection, {name: f"{name}.*" for name in names})
        connection.execute(
            "UPDATE outbox.subscription SET since = '1:1:', since_seq = -1"
            " WHERE reader LIKE 'other-%'"
        )
        settle(connection, names)


def fill(
    connection: psycopg.Connection[Any], day: Day, rows: int, due: str | None = None
) -> None:
    connection.execute(
        FILL.encode(),
        {
            "rows": rows,
            "begin": day.begin,
            "step": (day.end - day.begin) // (rows + 1),
            "due": None if due is None else day.end + timedelta(days=1),
        },
    )


def settle(connection: psycopg.Connection[Any], readers: Sequence[str]) -> None:
    """Store the positions of readers that have read everything."""
    for day in days_of(connection, "outbox.message"):
        ends_at = value_of(
            connection,
            "SELECT ends_at FROM outbox.partitions(%s) WHERE starts_at = %s",
            ("outbox.message", day.begin),
        )
        connection.execute(
            SETTLE.encode(),
            {"begin": day.begin, "end": ends_at, "readers": list(readers)},
        )
    connection.execute("VACUUM (ANALYZE) outbox.position")


def value_of(
    session: psycopg.Connection[Any] | psycopg.Cursor[Any],
    query: str,
    values: Sequence[object],
) -> Any:
    found = session.execute(query.encode(), values).fetchone()
    assert found is not None
    return found[0]


def gate(conditions: Conditions, url: str, rows: int) -> Iterator[Answer]:
    """Measure the gate of the large day."""
    with psycopg.connect(url, autocommit=True) as connection:
        day = connection.execute(DAY, ("outbox.message",)).fetchone()
        assert day is not None
        costs = [cost_of(connection, GATE, day) for _ in range(conditions.runs(3))]
    assert costs[-1].found == 0, f"{costs[-1].found} are unsettled"
    for what, unit in (("blocks", ""), ("milliseconds", "ms")):
        yield Answer(
            question=f"gate of {rows:,} rows, five readers of topics: {what}",
            figure=median(getattr(it, what) for it in costs),
            unit=unit,
            detail=f"the slowest took {max(it.milliseconds for it in costs):,.0f} ms",
        )


def looks(conditions: Conditions, url: str, when: str) -> Iterator[Answer]:
    """Measure what commands, views and metrics ask."""
    for name, query in (
        ("unrouted_messages", UNROUTED),
        ("unsettled_message", UNSETTLED),
    ):
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET jit = off")
            costs = [cost_of(connection, query) for _ in range(conditions.runs(3))]
        yield Answer(
            question=f"{name}: {when}",
            figure=median(cost.milliseconds for cost in costs),
            unit="ms",
            detail=f"{costs[-1].found:,} found, {costs[-1].blocks:,.0f} blocks",
        )
    for name, look in (("status", status), ("a scrape", scrape)):
        yield Answer(
            question=f"{name}: {when}",
            figure=median(spent(url, look) for _ in range(conditions.runs(5))),
            unit="ms",
            target=at_most(200),
            detail="a new session",
        )


def cost_of(
    connection: psycopg.Connection[Any], query: str, values: Sequence[object] = ()
) -> Cost:
    """Run a query, and count its rows and the blocks that it needs."""
    explain = f"EXPLAIN (ANALYZE, BUFFERS, TIMING off, FORMAT json) {query}"
    plan = value_of(psycopg.ClientCursor(connection), explain, values)[0]
    top: dict[str, Any] = plan["Plan"]
    return Cost(
        plan["Execution Time"],
        top["Shared Hit Blocks"] + top["Shared Read Blocks"],
        top["Actual Rows"],
    )


def spent(url: str, look: Callable[[AdministrationConnection], None]) -> float:
    with holding_lanes(url, wanted=True), reading(url) as connection:
        began = time.perf_counter()
        look(connection)
        return (time.perf_counter() - began) * 1_000


def status(connection: AdministrationConnection) -> None:
    overview, _ = examine_quickly(connection)
    assert overview.missing == (), overview.missing


def scrape(connection: AdministrationConnection) -> None:
    overview = read_overview(connection, RELAY)
    find_quickly(connection, overview, OF_PROCESSES)
    assert overview.missing == (), overview.missing


def running(conditions: Conditions) -> Iterator[Answer]:
    """Measure a backlog of which one in a hundred is the reader's, and the writer."""
    messages = conditions.size(500_000, quick=50_000)
    yield Answer(
        question="direct: rate of the reader of one in a hundred",
        figure=median(
            rate_of_rare(conditions, messages) for _ in range(conditions.runs(3))
        ),
        unit="/s",
        target=at_least(1_600),
        detail=f"its own of {messages:,} messages",
    )
    rates: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(conditions.runs(5)):
        for busy in rates:
            rate, _ = asyncio.run(write(conditions, consumers=busy))
            show(f"writer, {'five consumers' if busy else 'none'}", rate, "/s")
            rates[busy].append(rate)
    yield Answer(
        question="writers without pause beside five direct consumers, against none",
        figure=median(rates[True]) / median(rates[False]),
        target=at_least(0.95),
        detail=f"{median(rates[True]):,.0f} and {median(rates[False]):,.0f} /s,"
        " on the same processors",
    )
    for a_second in (20, 200):
        _, rings = asyncio.run(write(conditions, consumers=True, a_second=a_second))
        yield Answer(
            question=f"rings for each of {a_second} transactions a second",
            figure=rings,
            unit="",
            detail="of five direct consumers, one idle",
        )


def rate_of_rare(conditions: Conditions, messages: int) -> float:
    with conditions.migrated_database() as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET timezone = 'UTC'")
            connection.execute(DROP_MAIN)
            subscribe(connection, READERS)
            (today, *_) = days_of(connection, "outbox.message")
            fill(connection, today, messages)
            connection.execute("VACUUM (ANALYZE) outbox.message")
        rate = asyncio.run(read(url, "rare", int(messages * RARE)))
        show("the reader of one in a hundred", rate, "/s")
        return rate


async def read(url: str, reader: str, messages: int) -> float:
    """Read and ack so many messages as a direct consumer; return the rate."""
    async with direct(url, reader) as source:
        began = time.perf_counter()
        left = messages
        while left > 0:
            deliveries = await source.receive(limit=256)
            await asyncio.gather(*(delivery.ack() for delivery in deliveries))
            left -= len(deliveries)
        return messages / (time.perf_counter() - began)


def direct(url: str, reader: str) -> PostgresSource:
    return PostgresSource(
        url,
        consumer=reader,
        topics=[READERS[reader].replace("*", "placed")],
    )


async def write(
    conditions: Conditions, *, consumers: bool, a_second: int | None = None
) -> tuple[float, float]:
    """Return how many transactions a second writers commit, and rings for each."""
    seconds = conditions.size(5, quick=2)
    with conditions.migrated_database() as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(pgbench.TABLE)
            connection.execute(DROP_MAIN)
            subscribe(connection, READERS)
            name = connection.info.dbname
            connection.execute(
                f"ALTER DATABASE {name} SET track_functions = 'all'".encode()
            )
        reads = [
            asyncio.create_task(forever(url, reader)) for reader in READERS if consumers
        ]
        await asyncio.sleep(2 if reads else 0)
        rate = await asyncio.to_thread(
            pgbench.transactions_a_second,
            url,
            clients=4,
            seconds=seconds,
            transaction=TRANSACTION,
            at_most=a_second,
        )
        for task in reads:
            task.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        with psycopg.connect(url, autocommit=True) as connection:
            rings = float(value(connection, RINGS))
    return rate, rings / (rate * seconds)


async def forever(url: str, reader: str) -> None:
    async with direct(url, reader) as source:
        while True:
            deliveries = await source.receive(limit=256)
            await asyncio.gather(*(delivery.ack() for delivery in deliveries))
