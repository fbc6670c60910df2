"""The life of a message is read from indexes, in the days that can contain it."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import psycopg
import pytest

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.observability.message_life import (
    Found,
    State,
    read_lives_of_key,
    read_trace,
)
from pillarbox.outbox.postgres.connection import PIN_SESSION
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.days import make_partitions_at
from tests.fixtures.positions import publish
from tests.fixtures.postgres import Template, new_database
from tests.plans.conftest import (
    Node,
    days_of,
    executed_scans,
    record_plans,
    rows_read,
    walk,
)

DAY: Final = timedelta(days=1)
DAYS: Final = 24
ROWS: Final = 4000
# Ids contain the time of adding; every hundredth message caused the next one.
ADD = """
    INSERT INTO outbox.message
           (id, created_at, lane, topic, key, content_type, payload, headers)
    SELECT id, moment, 16 + n %% 16, 't', 'k' || n %% 100, 'text/plain', '\\x',
           CASE WHEN n %% 100 = 1 THEN jsonb_build_object('causation-id', lag(id) OVER
                (ORDER BY n)::text) ELSE '{}' END
      FROM (SELECT n, moment,
                   (lpad(to_hex((extract(epoch FROM moment) * 1000)::bigint), 12, '0')
                    || '7' || left(md5(n::text), 3) || '8'
                    || substr(md5(n::text), 4, 15))::uuid AS id
              FROM generate_series(0, %(count)s - 1) AS n,
                   LATERAL (SELECT %(begin)s::timestamptz
                                   + n * interval '2 seconds') AS made (moment)
           ) AS made
"""
HANDLE = """
    INSERT INTO inbox.receipt (message_id, message_at, consumer)
    SELECT id, inbox.moment_of(id), 'billing' FROM outbox.message
"""
GIVE_UP = """
    INSERT INTO {schema}.dead_letter (created_at, origin, message_id, topic, attempts,
        schema_version, content_type, headers, payload, error_reason)
    SELECT created_at, 'consumer:billing', id::text, 't', 1, 1, 'text/plain', '{{}}',
           '', 'why'
      FROM outbox.message WHERE seq % 10 = 0
"""
TABLES = ("outbox.message", "inbox.receipt", "inbox.job")
DEAD_LETTERS = ("outbox.dead_letter", "inbox.dead_letter")


@pytest.fixture(scope="module", params=["with statistics", "with stale statistics"])
def url(
    request: pytest.FixtureRequest,
    server: PostgresServer,
    template: Template,
    today: datetime,
) -> Iterator[str]:
    """Many days, two of which have messages that were published and handled."""
    with new_database(server, "pillarbox_life_plans", template) as name:
        url = server.database_url(name)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET timezone = 'UTC'")
            connection.execute("SET jit = off")
            days = [today - n * DAY for n in range(1, DAYS)]
            connection.execute("SET ROLE pillarbox_owner")
            for parent in (*TABLES, *DEAD_LETTERS):
                connection.execute(make_partitions_at(parent), (days,))
            connection.execute("RESET ROLE")
            connection.execute("ANALYZE")
            for day in (today - 20 * DAY, today - 2 * DAY):
                connection.execute(ADD, {"begin": day, "count": ROWS})
            publish(url)
            connection.execute(HANDLE)
            for schema in ("outbox", "inbox"):
                connection.execute(GIVE_UP.format(schema=schema))
            if request.param == "with statistics":
                connection.execute("VACUUM ANALYZE")
        yield url


class Recorded:
    """The plans of a session's statements, and the partitions that they touched."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._plans = record_plans(connection)

    def scans(self, statement: str, *tables: str) -> list[Node]:
        """Return the executed scans of partitions by the statement with this text."""
        return [
            scan
            for it in self._plans
            if statement in it["Query Text"]
            for scan in executed_scans(walk(it["Plan"]), *tables)
        ]

    def sequential(self) -> set[str]:
        """Return the partitions that were read sequentially, even empty ones."""
        scans = self.scans("")
        return {it["Relation Name"] for it in scans if it["Node Type"] == "Seq Scan"}


@contextmanager
def recording(url: str) -> Iterator[tuple[AdministrationConnection, Recorded]]:
    with psycopg.connect(url, autocommit=True) as connection:
        recorded = Recorded(connection)
        connection.execute(PIN_SESSION)
        connection.execute("SET ROLE pillarbox_monitor")
        yield connection, recorded


def id_of(url: str, number: int, back: int, today: datetime) -> UUID:
    """Return the id of the message with this number, added `back` days ago."""
    query = "SELECT id FROM outbox.message WHERE created_at = %s"
    with psycopg.connect(url) as connection:
        moment = today - back * DAY + number * timedelta(seconds=2)
        row: Any = connection.execute(query, (moment,)).fetchone()
    assert isinstance(row[0], UUID)
    return row[0]


@pytest.mark.parametrize("back", [20, 2], ids=lambda n: f"{n} days ago")
def test_a_life_is_read_from_indexes_of_the_days_that_can_contain_it(
    url: str, today: datetime, back: int
) -> None:
    id = id_of(url, 100, back, today)

    with recording(url) as (connection, recorded):
        found = read_trace({"shop": connection}, id)

    assert found.found is Found.FOUND
    assert found.life.state is State.PUBLISHED
    assert {"added", "published", "handled"} <= {it.what for it in found.life.steps}
    (caused,) = found.life.caused
    assert caused.state is State.PUBLISHED
    assert recorded.sequential() == set()
    day = (today - back * DAY).strftime("%Y%m%d")
    for name, table in (
        ("find_envelopes", "message"),
        ("message_life", "position"),
        ("message_life", "deferral"),
    ):
        text = {"find_envelopes": "Find messages by id"}.get(
            name, "outbox.message_life"
        )
        touched = recorded.scans(text, table)
        assert rows_read(touched) <= 60, (name, table)
        near = {(today - (back + n) * DAY).strftime("%Y%m%d") for n in (-2, -1, 0, 1)}
        assert days_of(touched) <= near, (name, table)
    assert days_of(recorded.scans("inbox.message_life", "receipt")) == {day}
    assert rows_read(recorded.scans("inbox.message_life", "receipt")) == 2


def test_the_messages_that_a_message_caused_are_found_by_index(
    url: str, today: datetime
) -> None:
    id = id_of(url, 200, 20, today)

    with recording(url) as (connection, recorded):
        read_trace({"shop": connection}, id)

    touched = recorded.scans("is_caused", "message")
    # The statement runs for the message, and for the one that it caused.
    assert rows_read(touched) == 1
    assert all(
        "expr" in str(it.get("Index Name")) for it in touched if "Index Name" in it
    )


def test_the_messages_of_a_key_are_read_in_its_lane_and_the_requested_days_of(
    url: str, today: datetime
) -> None:
    since = today - 3 * DAY

    with recording(url) as (connection, recorded):
        found = read_lives_of_key(
            {"shop": connection}, "k16", since=since, max_messages=5
        )

    del found  # the test's lanes don't match the keys
    touched = recorded.scans("wanted (lane)", "message")
    assert recorded.sequential() == set()
    assert min(days_of(touched)) >= since.strftime("%Y%m%d")
    assert rows_read(touched) <= 3 * ROWS / 16 + 3


def test_an_unknown_id_reads_no_row(url: str) -> None:
    with recording(url) as (connection, recorded):
        found = read_trace(
            {"shop": connection}, UUID("8f14e45f-ceea-467f-9575-30a1c8b1d9a2")
        )

    assert found.found is Found.NOT_KNOWABLE
    assert recorded.sequential() == set()
    assert rows_read(recorded.scans("", "message", "position", "receipt")) == 0


@pytest.mark.parametrize("schema", ["outbox", "inbox"])
def test_the_views_are_answered_by_indexes(
    url: str, today: datetime, schema: str
) -> None:
    id = id_of(url, 300, 2, today)

    with recording(url) as (connection, recorded):
        connection.execute("SET jit = off")
        connection.execute(
            f"SELECT * FROM {schema}.message_life WHERE message_id = %s", (id,)
        )
        connection.execute("SELECT")

    # A day has few positions, and a sequential scan of them can be faster.
    messages = ["message"] if schema == "outbox" else []
    touched = recorded.scans("message_life", *messages, "deferral", "receipt")
    assert touched
    assert rows_read(touched) <= 99
