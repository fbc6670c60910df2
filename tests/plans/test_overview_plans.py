"""The overview reads by index, only recent days, and no settled messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Final

import psycopg
import pytest
from starlette.datastructures import QueryParams

from pillarbox.outbox.administration.readers import MOST_COUNTED, list_readers
from pillarbox.outbox.observability.measures.reading import PARTS, Scope
from pillarbox.outbox.observability.overview import Overview, read_overview
from pillarbox.outbox.postgres.advisory_lock import LOCK_CLASS
from pillarbox.outbox.postgres.sql_files import load
from pillarbox.outbox.testing.postgres import PostgresServer
from pillarbox.outbox.web.messages import read_page
from tests.fixtures.days import make_partitions_at
from tests.fixtures.positions import defer, publish
from tests.fixtures.postgres import Template, new_database
from tests.plans.conftest import (
    Node,
    days_of,
    executed_scans,
    read_sequentially,
    record_plans,
    rows_per_loop,
    walk,
)

DAY: Final = timedelta(days=1)
# On a busy server, explaining takes a part longer than the 5 s it normally has.
PATIENCE: Final = timedelta(minutes=1)
DAYS: Final = 14
ROWS: Final = 6000
FRESH: Final = 300
WAITING: Final = 20
TABLES: Final = (
    "outbox.message",
    "inbox.receipt",
    "outbox.dead_letter",
    "inbox.dead_letter",
    "inbox.job",
)
LOGS: Final = ("deferral",)
"""Tables that are always read sequentially."""
ADD = """
    INSERT INTO outbox.message (id, created_at, lane, topic, key, content_type, payload)
    SELECT outbox.uuid7(), %(begin)s + n * interval '1 second', 16 + n %% 16,
           %(topic)s, 'k' || n %% 100, 'text/plain', '\\x'
      FROM generate_series(1, %(count)s) AS n
"""
RECEIVE = """
    INSERT INTO inbox.receipt (message_id, message_at, consumer)
    SELECT id, inbox.moment_of(id), 'billing'
      FROM (SELECT (lpad(to_hex((extract(epoch FROM %(begin)s + n * interval '1 second')
                                 * 1000)::bigint), 12, '0')
                    || '70008' || lpad(to_hex(n), 15, '0'))::uuid AS id
              FROM generate_series(1, %(count)s) AS n) AS made
"""
GIVE_UP = """
    INSERT INTO {side}.dead_letter (created_at, status, origin, message_id, topic,
           attempts, schema_version, content_type, headers, payload, error_reason)
    SELECT %(begin)s + n * interval '1 second',
           CASE WHEN n %% 1000 = 0 THEN 'PENDING' ELSE 'SUCCEEDED' END,
           'consumer:billing', n::text, 't', 1, 1, 'text/plain', '{}', '\\x', 'why'
      FROM generate_series(1, %(count)s) AS n
"""
START_JOBS = """
    INSERT INTO inbox.job (message_id, message_at, consumer, state, finished_at, topic)
    SELECT id, inbox.moment_of(id), 'billing',
           CASE WHEN n %% 1000 = 0 THEN 'queued' ELSE 'success' END,
           CASE WHEN n %% 1000 = 0 THEN NULL ELSE now() END, 't'
      FROM (SELECT outbox.uuid7() AS id, n FROM generate_series(1, %(count)s) AS n) AS j
"""


@pytest.fixture(scope="module", params=["with statistics", "without statistics"])
def url(
    request: pytest.FixtureRequest,
    server: PostgresServer,
    template: Template,
    today: datetime,
) -> Iterator[str]:
    """Settled days, and some messages of today that wait."""
    with new_database(server, "pillarbox_overview_plans", template) as name:
        url = server.database_url(name)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET timezone = 'UTC'")
            connection.execute(f"ALTER DATABASE {name} SET jit = off".encode())
            days = [today - n * DAY for n in range(1, DAYS)]
            connection.execute("SET ROLE pillarbox_owner")
            for table in TABLES:
                connection.execute(make_partitions_at(table), (days,))
            connection.execute("RESET ROLE")
            for begin in (today - 9 * DAY, today - DAY, today):
                values = {"begin": begin, "count": ROWS, "topic": "settled"}
                for statement in (ADD, RECEIVE):
                    connection.execute(statement, values)
                for side in ("outbox", "inbox"):
                    connection.execute(GIVE_UP.replace("{side}", side).encode(), values)
            connection.execute(START_JOBS, {"count": ROWS})
            publish(url)
            if request.param == "with statistics":
                connection.execute("ANALYZE")
            for topic, count in (("refused", WAITING), ("fresh", FRESH)):
                connection.execute(
                    ADD, {"begin": today, "count": count, "topic": topic}
                )
            defer(url, "refused", "topic = 'refused'", attempts=1)
        yield url


@pytest.fixture
def relay(url: str) -> Iterator[None]:
    """Hold every lane, as a relay does."""
    with psycopg.connect(
        url, autocommit=True, application_name="pillarbox relay host.1 lease"
    ) as connection:
        connection.execute(
            "SELECT pg_advisory_lock(%s, lane) FROM generate_series(0, 47) AS lane",
            (LOCK_CLASS,),
        )
        yield


@contextmanager
def plans_of(url: str) -> Iterator[tuple[psycopg.Connection, list[Node]]]:
    """Yield a connection of the monitor, and the plans of its statements."""
    with psycopg.connect(url, autocommit=True) as connection:
        plans = record_plans(connection)
        connection.execute("SET auto_explain.log_nested_statements = on")
        connection.execute("SET ROLE pillarbox_monitor")
        yield connection, plans


def read(url: str, scope: Scope) -> tuple[Overview, list[Node]]:
    """Return the overview, and the executed scans of partitions."""
    with plans_of(url) as (connection, plans):
        overview = read_overview(connection, scope)
        connection.execute("SELECT")
    return overview, scans_of(plans)


def scans_of(plans: Sequence[Node]) -> list[Node]:
    return executed_scans(node for plan in plans for node in walk(plan["Plan"]))


def from_end_to_end(scans: Sequence[Node]) -> set[str]:
    return {name for name in read_sequentially(scans) if not name.startswith(LOGS)}


def rows_of(scans: Sequence[Node], table: str) -> int:
    # PostgreSQL rounds the rows of a loop itself, before version 18.
    return sum(
        node["Actual Loops"] * round(rows_per_loop(node))
        for node in executed_scans(scans, table)
    )


@pytest.mark.usefixtures("relay")
def test_waiting_messages_are_found_without_reading_settled_ones(
    url: str, today: datetime
) -> None:
    overview, scans = read(
        url, Scope(parts=["processes", "backlogs"], patience=PATIENCE)
    )

    assert overview.outbox is not None
    assert overview.missing == ()
    assert overview.outbox.messages == FRESH + WAITING
    assert from_end_to_end(scans) == set()
    # Each waiting message, and one probe for each lane.
    assert rows_of(scans, "message") <= FRESH + 2 * WAITING + 2 * 48
    opened = days_of(executed_scans(scans, "message"))
    assert f"{today - 9 * DAY:%Y%m%d}" not in opened
    assert f"{today:%Y%m%d}" in opened


def test_without_a_relay_older_days_are_read_too(url: str) -> None:
    overview, scans = read(
        url, Scope(parts=["processes", "backlogs"], patience=PATIENCE)
    )

    assert overview.outbox is not None
    assert overview.outbox.messages == FRESH + WAITING
    assert from_end_to_end(scans) == set()
    assert rows_of(scans, "message") <= FRESH + 2 * WAITING + 4 * 48


def test_what_waits_for_a_consumer_is_found_without_reading_settled_messages(
    url: str,
) -> None:
    broker = "UPDATE outbox.reader SET broker = %s"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(broker, ["direct"])
        scope = Scope(parts=["processes", "backlogs", "consumers"], patience=PATIENCE)
        overview, scans = read(url, scope)
        connection.execute(broker, [None])

    assert overview.missing == ()
    assert overview.outbox is not None
    assert overview.outbox.messages == 0
    lags = {it.name: it.lag.messages for it in overview.consumers if it.lag}
    assert lags == {"main": FRESH + WAITING}
    assert from_end_to_end(scans) == set()
    # Each waiting message, and one probe for each lane of each day.
    assert rows_of(scans, "message") <= FRESH + 2 * WAITING + 4 * 48


def test_no_part_reads_a_table_sequentially(url: str) -> None:
    with plans_of(url) as (connection, plans):
        for part in PARTS:
            plans.clear()
            overview = read_overview(connection, Scope(parts=[part], patience=PATIENCE))
            connection.execute("SELECT")

            assert overview.missing == (), part
            assert from_end_to_end(scans_of(plans)) == set(), part


def test_rates_are_measured_from_a_few_rows(url: str) -> None:
    scope = Scope(
        parts=["rate", "consumers"],
        rows=100,
        window=3 * DAY,
        patience=PATIENCE,
    )

    overview, scans = read(url, scope)

    assert overview.rate is not None
    assert overview.rate.per_second > 0
    (consumer,) = overview.consumers
    assert consumer.rate is not None
    assert rows_of(scans, "position") <= 5 * 48
    assert rows_of(scans, "receipt") <= 100 + 1
    assert 0 < rows_of(scans, "message") <= 5 * 16


def test_a_large_backlog_is_counted_up_to_a_limit_and_not_read(
    server: PostgresServer, template: Template, today: datetime
) -> None:
    waiting = 60_000
    with new_database(server, "pillarbox_backlog_plans", template) as name:
        url = server.database_url(name)
        with psycopg.connect(url, autocommit=True) as connection:
            values = {"begin": today, "count": waiting, "topic": "waiting"}
            connection.execute(ADD, values)
            connection.execute("VACUUM ANALYZE outbox.message")
        with plans_of(url) as (connection, plans):
            overview = read_overview(
                connection, Scope(parts=["backlogs"], patience=PATIENCE)
            )
            (reader,) = list_readers(connection)
            with connection.transaction():
                shown = read_page(connection, QueryParams("state=ready&window=7d"))
            connection.execute("SELECT")

    assert overview.outbox is not None
    assert not overview.outbox.is_complete
    assert overview.outbox.estimated == pytest.approx(waiting, rel=0.05)
    assert reader.messages == MOST_COUNTED
    assert shown["rows"][0]["created_at"] == reader.oldest
    assert reader.oldest == today + timedelta(seconds=1)
    nodes = [node for plan in plans for node in walk(plan["Plan"])]
    assert max(node["Actual Rows"] * node["Actual Loops"] for node in nodes) < 1.5 * (
        MOST_COUNTED
    )


def test_messages_that_wait_in_the_log_are_counted_up_to_a_limit(
    server: PostgresServer, template: Template, today: datetime
) -> None:
    scheduled, most = 30_000, 4 * Scope().per_lane
    with new_database(server, "pillarbox_log_plans", template) as name:
        url = server.database_url(name)
        with psycopg.connect(url, autocommit=True) as connection:
            for topic, count in (("scheduled", scheduled), ("refused", 1)):
                values = {"begin": today, "count": count, "topic": topic}
                connection.execute(ADD, values)
        defer(url, "scheduled", "topic = 'scheduled'")
        # Behind all others.
        defer(url, "refused", "topic = 'refused'", attempts=1)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("ANALYZE outbox.deferral")  # as autovacuum does
        with plans_of(url) as (connection, plans):
            scope = Scope(parts=["backlogs", "blocked"], patience=PATIENCE)
            overview = read_overview(connection, scope)
            (reader,) = list_readers(connection)
            connection.execute("SELECT")

    assert overview.outbox is not None
    assert overview.missing == ()
    counted = overview.outbox
    assert (counted.is_complete, counted.scheduled, counted.refused) == (
        False,
        most + 1,
        1,
    )
    assert overview.blocked is not None
    assert [it.topic for it in overview.blocked.oldest] == ["refused"]
    assert (reader.messages, reader.days) == (MOST_COUNTED, 1)
    scans = scans_of(plans)
    assert from_end_to_end(scans) == set()
    # Of each entry whether it is settled or followed by another one; twice, since the
    # list of readers counts more of them.
    assert 0 < rows_of(scans, "deferral") <= 3 * (most + MOST_COUNTED)
    assert rows_of(scans, "message") <= most + 48 * 4


def test_the_doctor_compares_the_oldest_dead_letters_with_the_receipts(
    server: PostgresServer, template: Template, today: datetime
) -> None:
    with new_database(server, "pillarbox_letter_plans", template) as name:
        url = server.database_url(name)
        with psycopg.connect(url, autocommit=True) as connection:
            letters = GIVE_UP.replace("{side}", "inbox").replace(
                "'SUCCEEDED'", "'PENDING'"
            )
            connection.execute(letters.encode(), {"begin": today, "count": 30_000})
            connection.execute("VACUUM ANALYZE inbox.dead_letter")
        with plans_of(url) as (connection, plans):
            connection.execute("RESET ROLE")
            connection.execute(load("outbox", "check_receipts"), {})
            connection.execute("SELECT")

    scans = scans_of(plans)
    assert rows_of(scans, "dead_letter") == 10_000
    assert read_sequentially(executed_scans(scans, "dead_letter")) == set()
