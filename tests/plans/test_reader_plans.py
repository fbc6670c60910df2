"""Without a reader of everything, nothing reads what readers of topics have settled."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import psycopg
import pytest

from pillarbox.outbox.administration.readers import list_readers
from pillarbox.outbox.observability.measures.reading import Scope
from pillarbox.outbox.observability.overview import read_overview
from pillarbox.outbox.postgres.sql_files import load
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.days import make_partitions_at
from tests.fixtures.postgres import Template, new_database
from tests.fixtures.variants import as_variant

LARGE: Final = 20_000
SMALL: Final = 480
WAITING: Final = 40
LANES: Final = 16
TOPICS: Final = 4
ADD = """
INSERT INTO outbox.message (id, created_at, lane, topic, content_type, payload)
SELECT outbox.uuid7(), %(begin)s + n * interval '1 second', 16 + n %% 16,
       CASE WHEN n %% 2 = 0 THEN 'orders.' || n %% 3 ELSE 'invoices' END, 'c', ''
  FROM generate_series(1, %(rows)s) AS n
"""
DROP_MAIN = "UPDATE outbox.subscription SET ended_at = '2000-01-01'"
# One gets all that there is; the others get topics that have no messages.
READERS = """
WITH reader AS (
    INSERT INTO outbox.reader (reader)
    SELECT 'reader-' || n FROM generate_series(1, %(readers)s) AS n RETURNING reader
)
INSERT INTO outbox.subscription (reader, topic)
SELECT reader, topic
  FROM reader,
       unnest(CASE reader WHEN 'reader-1' THEN ARRAY['invoices', 'orders.*']
              ELSE ARRAY[reader, 'p' || reader || '.*'] END) AS topic
"""
SETTLE = """
INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages, lane,
                             reader, snapshot)
SELECT day, day + interval '24 hours', max(seq), max(seq), 1, lane, r.reader,
       pg_current_snapshot()
  FROM (SELECT date_trunc('day', created_at, 'UTC') AS day, lane, seq
          FROM outbox.message) AS m,
       (SELECT reader FROM outbox.reader WHERE reader <> 'main') AS r
 GROUP BY day, lane, seq / 8000, r.reader
"""
SUMMARIZE = """
SELECT brin_summarize_new_values(inhrelid) FROM pg_inherits
 WHERE inhparent = 'outbox.message_xid_idx'::regclass
"""
GATE = """
SELECT count(*) FROM outbox.partitions('outbox.message') AS d,
       outbox.unsettled_messages(d.partition, d.starts_at, d.ends_at)
 WHERE d.starts_at = %s
"""
FIND_UNROUTED = (
    f"SELECT u.messages FROM ({load('outbox', 'find_unrouted')}) AS u".replace(
        "%(most)s", "1000"
    ).replace("%(days)s", "NULL")
)
# Of today's few messages, whose day is so small, everything may be read.
READ = """
SELECT coalesce(sum(seq_tup_read), 0), coalesce(sum(idx_tup_fetch), 0)
  FROM outbox.partitions(%s) JOIN pg_stat_xact_user_tables ON relid = partition
 WHERE starts_at < now() - interval '1 day'
"""


class Case(NamedTuple):
    """A database: its number of days and readers, and whether it has statistics."""

    days: int
    readers: int
    is_analyzed: bool


class Cost(NamedTuple):
    """What a query found, and how many rows of messages and positions it read."""

    found: int
    read_sequentially: int
    messages: int
    positions: int


@pytest.fixture(
    scope="module",
    params=[Case(2, 1, True), as_variant(Case(90, 50, False)), Case(90, 50, True)],
    ids=str,
)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def url(
    case: Case, server: PostgresServer, template: Template, today: datetime
) -> Iterator[str]:
    """Days of settled messages; yesterday has many, and today has some that wait."""
    with new_database(server, "pillarbox_reader_plans", template) as name:
        url = server.database_url(name)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET timezone = 'UTC'")
            days = [today - timedelta(days=n) for n in range(1, case.days)]
            connection.execute("SET ROLE pillarbox_owner")
            connection.execute(make_partitions_at("outbox.message"), (days,))
            connection.execute("RESET ROLE")
            # The readers begin while there are messages.
            connection.execute("SELECT nextval('outbox.message_seq')")
            connection.execute(DROP_MAIN)
            connection.execute(READERS, {"readers": case.readers})
            # The oldest first, as they were added.
            for number, day in reversed([*enumerate(days)]):
                rows = SMALL if number else LARGE
                connection.execute(ADD, {"begin": day, "rows": rows})
            connection.execute(SETTLE)
            connection.execute(ADD, {"begin": today, "rows": WAITING})
            connection.execute(SUMMARIZE)
            if case.is_analyzed:
                connection.execute("ANALYZE outbox.message, outbox.position")
        yield url


def cost(url: str, query: str, *values: object) -> Cost:
    with psycopg.connect(url) as connection:
        connection.execute("SET jit = off")
        ((found,),) = connection.execute(query.encode(), values).fetchall()
        read = read_so_far(connection)
        connection.rollback()
    return read._replace(found=found)


def read_so_far(connection: psycopg.Connection) -> Cost:
    """Return what this transaction has read."""
    read = [
        connection.execute(READ, (table,)).fetchone()
        for table in ("outbox.message", "outbox.position")
    ]
    (in_order, messages), (more, positions) = (row or (0, 0) for row in read)
    return Cost(0, int(in_order + more), int(messages), int(positions))


def test_the_gate_reads_no_settled_message(
    url: str, case: Case, today: datetime
) -> None:
    found = cost(url, GATE, today - timedelta(days=1))

    assert found.found == found.read_sequentially == 0
    # The first of each lane, twice, and one for each topic and subscription.
    assert found.messages <= 2 * LANES + 2 * TOPICS + 2 * case.readers
    # Only of the reader that has messages there.
    assert found.positions <= LANES


def test_the_gate_finds_what_waits(url: str, today: datetime) -> None:
    assert cost(url, GATE, today).found == WAITING


@pytest.mark.parametrize(
    "query", ["SELECT count(*) FROM outbox.unrouted_messages()", FIND_UNROUTED]
)
def test_what_no_reader_gets_is_found_without_reading_what_one_gets(
    url: str, case: Case, query: str
) -> None:
    found = cost(url, query)

    assert found.found == found.read_sequentially == 0
    assert found.messages <= case.days * (LANES + TOPICS + 1)


def test_what_waits_is_found_from_the_positions(url: str, case: Case) -> None:
    found = cost(url, "SELECT count(*) FROM outbox.unsettled_message")

    assert found.found == WAITING
    assert found.read_sequentially == 0
    # The last message of each lane and day, which positions are compared with.
    assert found.messages <= case.days * (3 * LANES + TOPICS + 1)
    # Of each reader and lane whether yesterday has one, that one, and that of the day
    # before, whatever the number of days; once more for what committed late.
    assert found.positions <= 2 * 3 * LANES * case.readers


def test_what_waits_for_consumers_is_counted_in_recent_days_for_all_of_them_at_once(
    url: str, case: Case
) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE outbox.reader SET broker = 'direct'")
        scope = Scope(parts=["consumers"], patience=timedelta(minutes=1))
        overview = read_overview(connection, scope)
        read = read_so_far(connection)
        connection.rollback()

    assert overview.missing == ()
    lags = {it.name: it.lag.messages for it in overview.consumers if it.lag}
    assert (len(lags), sum(lags.values())) == (case.readers, WAITING)
    assert lags["reader-1"] == WAITING
    assert read.read_sequentially == 0
    # Those that wait, and the last message of each lane and day.
    assert read.messages <= 4 * LANES
    # Whether it has read up to recent days, and twice its position, as above.
    assert read.positions <= 5 * LANES * case.readers


def test_readers_are_listed_with_what_they_hold_back_without_reading_what_is_settled(
    url: str, case: Case
) -> None:
    with psycopg.connect(url) as connection:
        readers = {it.reader: it for it in list_readers(connection)}
        read = read_so_far(connection)
        connection.rollback()

    assert {it.messages for it in readers.values()} == {WAITING, 0}
    assert (readers["reader-1"].messages, readers["reader-1"].days) == (WAITING, 1)
    assert readers["reader-1"].bytes > 0
    assert read.read_sequentially == 0
    assert read.messages <= case.days * (3 * LANES + TOPICS + 1)
    assert read.positions <= 2 * 3 * LANES * case.readers
