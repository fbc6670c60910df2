"""Queries of messages by users and commands read no settled days needlessly."""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

import psycopg
import pytest

from pillarbox.outbox.postgres.sql_files import load
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.days import make_partitions_at
from tests.fixtures.positions import defer
from tests.fixtures.postgres import Template, new_database
from tests.plans.conftest import (
    Explained,
    Node,
    days_of,
    executed_plans,
    executed_scans,
    read_sequentially,
    rows_read,
)

DAY: Final = timedelta(days=1)
DAYS: Final = 14
SETTLED: Final = 6000
FRESH: Final = 3000
PUBLISHED: Final = 3000
WAITING: Final = 40
ADD = """
    INSERT INTO outbox.message (id, created_at, lane, topic, key, content_type, payload)
    SELECT outbox.uuid7(), %(begin)s + n * interval '1 second', 16 + n %% 16,
           %(topic)s, 'k' || n %% 100, 'text/plain', '\\x'
      FROM generate_series(1, %(count)s) AS n
"""
# As a relay does that claims three messages of each lane at a time.
SETTLE = """
    INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages, lane,
                                 reader, snapshot)
    SELECT day, day + interval '24 hours', min(number), max(seq), count(*), lane,
           'main', pg_current_snapshot()
      FROM (SELECT date_trunc('day', created_at, 'UTC') AS day, lane, seq, topic,
                   row_number() OVER (PARTITION BY lane ORDER BY seq) AS number
              FROM outbox.message) AS settled
     WHERE topic = %s
     GROUP BY day, lane, number / 3
"""
ANALYZE = "ANALYZE outbox.message, outbox.position, outbox.deferral"

Run = Callable[..., Explained]


@pytest.fixture(scope="module", params=["with statistics", "with stale statistics"])
def url(
    request: pytest.FixtureRequest,
    server: PostgresServer,
    template: Template,
    today: datetime,
) -> Iterator[str]:
    """Settled days, and messages of today that are settled, fresh or refused."""
    with new_database(server, "pillarbox_status_plans", template) as name:
        url = server.database_url(name)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET timezone = 'UTC'")
            days = [today - n * DAY for n in range(1, DAYS)]
            connection.execute("SET ROLE pillarbox_owner")
            connection.execute(make_partitions_at("outbox.message"), (days,))
            connection.execute("RESET ROLE")
            for day in (today - 9 * DAY, today - DAY):
                connection.execute(
                    ADD, {"begin": day, "count": SETTLED, "topic": "settled"}
                )
            connection.execute(SETTLE, ("settled",))
            connection.execute(ANALYZE)
            for topic, count in (
                ("published", PUBLISHED),
                ("refused", WAITING),
                ("fresh", FRESH),
            ):
                connection.execute(
                    ADD, {"begin": today, "count": count, "topic": topic}
                )
            connection.execute(SETTLE, ("published",))
            defer(url, "refused", "topic = 'refused'", attempts=1)
            if request.param == "with statistics":
                connection.execute(ANALYZE)
        yield url


@pytest.fixture
def run(request: pytest.FixtureRequest, url: str) -> Iterator[Run]:
    """Run a statement as a monitor or another role, and return its plan."""
    role = getattr(request, "param", "monitor")
    settings = {"jit": "off", "search_path": "pg_catalog, pg_temp"}
    with executed_plans(url, f"pillarbox_{role}", settings) as execute:

        def explain(
            statement: str, parameters: Mapping[str, object] | None = None
        ) -> Explained:
            return Explained(execute(statement, parameters or {}), {})

        yield explain


def scans(plan: Explained, table: str) -> list[Node]:
    return executed_scans(plan.nodes, table)


def days(plan: Explained, table: str) -> set[str]:
    return days_of(scans(plan, table))


def rows(plan: Explained, table: str) -> int:
    return rows_read(scans(plan, table))


def about(found: int, expected: int) -> bool:
    """Return whether the numbers agree: a plan rounds the rows of each lane."""
    return abs(found - expected) <= 48


def by_index(plan: Explained, table: str) -> bool:
    """Return whether no partition with rows was read sequentially."""
    return read_sequentially(scans(plan, table)) == set()


def named(day: datetime) -> str:
    return day.strftime("%Y%m%d")


def find(url: str, topic: str) -> UUID:
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT id FROM outbox.message WHERE topic = %s LIMIT 1", (topic,)
        ).fetchone()
    assert row is not None
    assert isinstance(row[0], UUID)
    return row[0]


@pytest.mark.parametrize("topic", ["settled", "refused", "fresh"])
def test_the_status_of_a_message_is_found_by_the_indexes_of_one_day(
    run: Run, url: str, topic: str
) -> None:
    plan = run(
        "SELECT * FROM outbox.message_status WHERE id = %(id)s",
        {"id": find(url, topic)},
    )

    assert by_index(plan, "message")
    assert rows(plan, "message") == 1
    assert len(days(plan, "position")) == 1
    assert len(days(plan, "deferral")) == 1
    assert rows(plan, "position") <= 1


@pytest.mark.parametrize(
    "query",
    [
        "SELECT state, count(*) FROM outbox.message_status"
        " WHERE created_at >= %(begin)s AND created_at < %(end)s GROUP BY state",
        "SELECT * FROM outbox.message_status WHERE published_at IS NULL"
        " AND topic = 'settled' AND created_at >= %(begin)s AND created_at < %(end)s",
    ],
    ids=["states of a day", "unpublished of a topic"],
)
def test_the_status_of_a_day_costs_one_index_scan_for_each_message(
    run: Run, today: datetime, query: str
) -> None:
    bounds = {"begin": today - DAY, "end": today}

    plan = run(query, bounds)

    assert days(plan, "message") == {named(today - DAY)}
    assert days(plan, "position") == {named(today - DAY)}
    (positions,) = scans(plan, "position")
    assert "Index" in positions["Node Type"]
    assert positions["Actual Loops"] == SETTLED
    # Only the first position that reaches the message, not the whole day's.
    assert rows(plan, "position") <= SETTLED


def test_unsettled_messages_are_found_above_the_positions(
    run: Run, today: datetime
) -> None:
    plan = run("SELECT count(*) FROM outbox.unsettled_message")

    assert by_index(plan, "message")
    assert about(rows(plan, "message"), FRESH)


def test_refused_messages_are_listed_without_those_that_are_settled(run: Run) -> None:
    plan = run(load("outbox", "list_refused"), {"max_rows": 50, "most": 10_000})

    assert by_index(plan, "message")
    assert rows(plan, "message") <= WAITING


WHICH: Final = {
    "reader": "main",
    **dict.fromkeys(("topic", "topic_prefix", "key", "tenant")),
}


@pytest.mark.parametrize(
    ("run", "name"),
    [("relay", "find_published"), ("monitor", "count_published")],
    indirect=["run"],
)
@pytest.mark.parametrize("topic", [None, "settled"])
def test_a_replay_reads_the_requested_days_and_a_position_for_each_message(
    run: Run, today: datetime, name: str, topic: str | None
) -> None:
    bounds = {"since": today - 2 * DAY + timedelta(hours=1), "until": today}
    more = {"max_rows": None} if name == "find_published" else {}
    statement = load("relay", "find_published" if more else "count_published")

    plan = run(statement, {**WHICH, "topic": topic, **bounds, **more})

    assert days(plan, "message") == {named(today - 2 * DAY), named(today - DAY)}
    assert days(plan, "position") == {named(today - DAY)}
    assert rows(plan, "position") <= SETTLED


@pytest.mark.parametrize("run", ["relay"], indirect=True)
@pytest.mark.parametrize("count", [1, 200])
def test_a_batch_of_a_replay_is_found_by_the_indexes_of_its_days(
    run: Run, url: str, today: datetime, count: int
) -> None:
    with psycopg.connect(url) as connection:
        places = connection.execute(
            "SELECT id, created_at FROM outbox.message"
            " WHERE created_at >= %s AND created_at < %s ORDER BY seq LIMIT %s",
            (today - DAY, today, count),
        ).fetchall()
    moments = [moment for _, moment in places]

    plan = run(
        load("relay", "replay_published"),
        {
            "reader": "main",
            "ids": [id for id, _ in places],
            "first": min(moments),
            "last": max(moments),
        },
    )

    # For many rows of a small partition, a sequential scan is faster.
    assert by_index(plan, "message") or count > 1
    assert days(plan, "message") == {named(today - DAY)}
    assert days(plan, "position") == {named(today - DAY)}
    assert rows(plan, "position") <= count
