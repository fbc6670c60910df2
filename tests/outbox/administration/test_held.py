"""In every table, a row that still needs handling holds its partition."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import psycopg

from pillarbox.outbox.postgres.sql_files import load
from tests.fixtures.consumers import id_of
from tests.fixtures.positions import publish
from tests.fixtures.sessions import execute
from tests.fixtures.upkeep import run_upkeep
from tests.outbox.administration.test_upkeep import drop_ahead, old_partition

Settle = Callable[[str, dict[str, Any]], object]

DAYS_AGO: Final = 40
LEFT: Final = """
SELECT partition::text FROM outbox.partitions(%s)
 WHERE ends_at < now() - 31 * interval '24 hours' ORDER BY starts_at
"""
HOLDS: Final = """
SELECT unsettled FROM outbox.upkeep_plan(%s)
 WHERE step = 'hold' AND reason LIKE '%%unsettled rows: 1%%'
"""
GAPS: Final = """
SELECT gaps FROM outbox.partition_health WHERE parent_table = 'outbox.message'
"""
DEAD_LETTER: Final = """
INSERT INTO {} (id, created_at, origin, message_id, topic, attempts, schema_version,
                content_type, headers, payload, error_reason)
VALUES (%(id)s, %(at)s, 'o', 'm', 't', 1, 1, 'c', '{{}}', '', 'why')
"""
MESSAGE: Final = """
INSERT INTO outbox.message (id, created_at, lane, topic, content_type, payload)
VALUES (%(id)s, %(at)s, 0, 't', 'c', '')
"""
JOB: Final = """
INSERT INTO inbox.job (message_id, message_at, consumer, topic, state,
                       cancel_requested_at, lease_until)
VALUES (%(id)s, %(at)s, 'reports', 't', {})
"""


class Held(NamedTuple):
    """A row that holds its partition, and what settles it."""

    table: str
    insert: str
    settle: Settle


def by_statement(statement: str) -> Settle:
    return lambda url, row: execute(url, statement, row)


def job(state: str) -> Held:
    cancel = "UPDATE inbox.job SET state = 'cancelled', finished_at = now()"
    return Held("inbox.job", JOB.format(state), by_statement(cancel))


def dead_letter(table: str, decision: str) -> Held:
    settled = by_statement(f"UPDATE {table} SET {decision}")
    return Held(table, DEAD_LETTER.format(table), settled)


HELD: Final = {
    # test_gate tests what holds a message.
    "a message": Held("outbox.message", MESSAGE, lambda url, _: publish(url)),
    "a dead letter of the outbox": dead_letter(
        "outbox.dead_letter", "status = 'SUCCEEDED'"
    ),
    "a dead letter of the inbox": dead_letter(
        "inbox.dead_letter", "status = 'DISCARDED', discard_reason = 'a test'"
    ),
    "a job that waits": job("'queued', NULL, NULL"),
    "a job in progress": job("'in_progress', NULL, NULL"),
    "a job that is being cancelled": job("'waiting', now(), now() + interval '1 hour'"),
}


def noon(days_ago: int = DAYS_AGO) -> datetime:
    """Return the middle of a day that can be held."""
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return midnight - timedelta(days=days_ago - 0.5)


def test_an_unsettled_row_holds_its_partition_and_no_other(database_url: str) -> None:
    rows, held = {}, {}
    for number, (name, (table, insert, _)) in enumerate(HELD.items()):
        day = DAYS_AGO + 2 * number
        for days in (day + 1, day, day - 1):
            old_partition(database_url, days, table)
        rows[name] = {"id": id_of(noon(day)), "at": noon(day)}
        held[name] = execute(database_url, LEFT, (table,))[-2]
        execute(database_url, insert, rows[name])

    run_upkeep(database_url)

    for name, (table, _, _) in HELD.items():
        left = execute(database_url, LEFT, (table,))
        assert held[name] in left, name
        of_table = [n for n in HELD if HELD[n].table == table]
        assert len(left) == len(of_table), name
        assert execute(database_url, HOLDS, (table,)) == [(1,)] * len(left), name

    for name, (_, _, settle_it) in HELD.items():
        settle_it(database_url, rows[name])
    run_upkeep(database_url)

    for table in {held.table for held in HELD.values()}:
        assert execute(database_url, LEFT, (table,)) == []


def test_only_a_missing_day_ahead_is_a_gap(database_url: str) -> None:
    # A held partition can be far from the others, and so can one that was premade by a
    # clock that was ahead.
    for days in (DAYS_AGO, -300):
        old_partition(database_url, days)
    assert execute(database_url, GAPS) == [(0,)]

    drop_ahead(database_url, 2)
    assert execute(database_url, GAPS) == [(1,)]


def test_a_cancelled_job_without_its_message_holds_no_partition(
    database_url: str,
) -> None:
    old_partition(database_url, DAYS_AGO, "inbox.job")
    with psycopg.connect(database_url) as connection:
        connection.execute(
            load("inbox", "cancel_job"),
            {"id": id_of(noon()), "at": noon(), "consumer": "x", "reason": "a test"},
        )
        # Its worker died before it saw the request, and its message never comes back.
        dead = JOB.format(
            "'waiting', now() - interval '2 hours', now() - interval '1 hour'"
        )
        connection.execute(dead, {"id": id_of(noon()), "at": noon()})

    run_upkeep(database_url)

    assert execute(database_url, LEFT, ("inbox.job",)) == []
