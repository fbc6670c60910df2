"""In every table, a row that still needs handling holds its partition."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import psycopg
import pytest

from outbox.postgres.sql_files import load
from tests.fixtures.consumers import id_of
from tests.fixtures.positions import give_up, publish
from tests.fixtures.sessions import execute
from tests.fixtures.upkeep import run_upkeep
from tests.outbox.administration.test_upkeep import old_partition

DAYS_AGO = 40
LEFT = """
SELECT partition::text FROM outbox.partitions(%s)
 WHERE ends_at < now() - 31 * interval '24 hours'
"""
HOLDS = """
SELECT unsettled FROM outbox.upkeep_plan(%s) WHERE step = 'hold' AND reason LIKE %s
"""
GAPS = """
SELECT gaps FROM outbox.partition_health WHERE parent_table = 'outbox.message'
"""
IN_THREE_DAYS = """
SELECT partition::text FROM outbox.partitions('outbox.message')
 WHERE starts_at = date_trunc('day', now(), 'UTC') + 3 * interval '24 hours'
"""
DEAD_LETTER = """
INSERT INTO {} (id, created_at, origin, message_id, topic, attempts, schema_version,
                content_type, headers, payload, error_reason)
VALUES (%s, %s, 'o', 'm', 't', 1, 1, 'c', '{{}}', '', 'why')
"""
MESSAGE = """
INSERT INTO outbox.message (id, created_at, lane, topic, content_type, payload,
                            available_at)
VALUES (%s, %s, 0, 't', 'c', '', {})
"""
WAITING = f"""
WITH m AS ({MESSAGE.format("NULL")} RETURNING created_at, seq, id, lane),
     p AS (
    INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages, lane,
                                 reader, owner, snapshot)
    SELECT date_trunc('day', created_at, 'UTC'),
           date_trunc('day', created_at, 'UTC') + interval '24 hours', 1, seq, 1, lane,
           'main', gen_random_uuid(),
           format('1:%%s:', pg_current_xact_id()::text::bigint + 1)::pg_snapshot
      FROM m
)
INSERT INTO outbox.deferral (created_at, due_at, seq, id, lane, run, cause, key)
SELECT created_at, {{due_at}}, seq, id, lane, {{run}}, '{{cause}}', 'k' FROM m
"""
SUBSCRIBED = """
WITH subscribed AS (
    INSERT INTO inbox.subscription (consumer, topic, since, since_seq)
    VALUES ('billing', 't', '1:1:', -1) ON CONFLICT DO NOTHING
)
"""
DELIVERY = """
INSERT INTO inbox.message (message_id, created_at, lane, schema_version, topic,
                           content_type, headers, payload)
VALUES (%s, %s, 0, 1, 't', 'c', '{}', '')
"""
GIVEN_BACK = f"""
{SUBSCRIBED}, d AS ({DELIVERY} RETURNING *)
INSERT INTO inbox.deferral (created_at, due_at, seq, lane, cause, consumer)
SELECT created_at, now(), seq, lane, 'refused', 'billing' FROM d
"""
ACK = """
INSERT INTO inbox.position (created_at, ends_at, number, up_to, messages, lane, reader,
                            owner, snapshot)
SELECT date_trunc('day', created_at, 'UTC'),
       date_trunc('day', created_at, 'UTC') + interval '24 hours', 1, seq, 1, lane,
       'billing', gen_random_uuid(), pg_current_snapshot() FROM inbox.message
"""
ACK_LATER = """
INSERT INTO inbox.deferral (created_at, seq, lane, cause, consumer)
SELECT created_at, seq, lane, 'acked', 'billing' FROM inbox.message
"""
JOB = """
INSERT INTO inbox.job (message_id, message_at, consumer, topic, state,
                       cancel_requested_at)
VALUES (%s, %s, 'reports', 't', {})
"""


class Held(NamedTuple):
    """A row that holds its partition, and the statement that settles it."""

    table: str
    insert: str
    settle: Callable[[str], object]


def by_statement(statement: str) -> Callable[[str], object]:
    return lambda url: execute(url, statement)


def message(available_at: str, outcome: str = "published") -> Held:
    return Held(
        "outbox.message",
        MESSAGE.format(available_at),
        publish if outcome == "published" else give_up,
    )


def waiting(cause: str, *, due_at: str = "now()", run: int = 0) -> Held:
    """Return a message that is covered, but not settled."""
    insert = WAITING.format(cause=cause, due_at=due_at, run=run)
    return Held("outbox.message", insert, publish)


def delivery(insert: str, settle: str) -> Held:
    return Held("inbox.message", insert, by_statement(settle))


def dead_letter(table: str, decision: str) -> Held:
    settled = by_statement(f"UPDATE {table} SET {decision}")
    return Held(table, DEAD_LETTER.format(table), settled)


def job(state: str) -> Held:
    return Held(
        "inbox.job",
        JOB.format(state),
        by_statement("UPDATE inbox.job SET state = 'cancelled', finished_at = now()"),
    )


HELD = {
    "a message that is ready": message("NULL"),
    "a message that is scheduled": message("now()"),
    "a message that is dead-lettered later": message("NULL", "dead_lettered"),
    "a message that waits for its retry": waiting("refused"),
    "a message whose key is blocked": waiting("blocked", due_at="NULL"),
    "a message that is to be published again": waiting("replayed", run=1),
    "a delivery that is ready": delivery(SUBSCRIBED + DELIVERY, ACK),
    "a delivery that was nacked": delivery(GIVEN_BACK, ACK_LATER),
    "a dead letter of the outbox": dead_letter(
        "outbox.dead_letter", "status = 'SUCCEEDED'"
    ),
    "a dead letter of the inbox": dead_letter(
        "inbox.dead_letter", "status = 'DISCARDED', discard_reason = 'a test'"
    ),
    "a job that waits": job("'queued', NULL"),
    "a job in progress": job("'in_progress', NULL"),
    "a job that is to be cancelled": job("'waiting', now()"),
}


def noon() -> datetime:
    """Return the middle of the day that can be held."""
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return midnight - timedelta(days=DAYS_AGO - 0.5)


@pytest.mark.parametrize("name", HELD)
def test_an_unsettled_row_holds_its_partition_and_no_other(
    name: str, database_url: str
) -> None:
    table, insert, settle_it = HELD[name]
    for days in (DAYS_AGO - 1, DAYS_AGO, DAYS_AGO + 1):
        old_partition(database_url, days, table)
    at = noon()
    (_, held, _) = execute(database_url, LEFT, (table,))
    execute(database_url, insert, (id_of(at), at))

    run_upkeep(database_url)

    assert execute(database_url, LEFT, (table,)) == [held]
    assert execute(database_url, HOLDS, (table, "%unsettled rows: 1%")) == [(1,)]

    settle_it(database_url)
    run_upkeep(database_url)

    assert execute(database_url, LEFT, (table,)) == []


@pytest.mark.week
def test_dropped_partitions_around_a_held_one_are_not_a_gap(database_url: str) -> None:
    for days in (DAYS_AGO - 1, DAYS_AGO, DAYS_AGO + 1):
        old_partition(database_url, days)
    (_, held, _) = execute(database_url, LEFT, ("outbox.message",))
    at = noon()
    execute(database_url, HELD["a message that is ready"].insert, (id_of(at), at))
    run_upkeep(database_url)
    assert execute(database_url, LEFT, ("outbox.message",)) == [held]

    assert execute(database_url, GAPS) == [(0,)]

    ((ahead,),) = execute(database_url, IN_THREE_DAYS)
    execute(database_url, f"DROP TABLE {ahead}")
    assert execute(database_url, GAPS) == [(1,)]


def test_a_partition_premade_by_a_clock_ahead_leaves_no_gap(database_url: str) -> None:
    old_partition(database_url, -300)

    assert execute(database_url, GAPS) == [(0,)]


def test_a_cancelled_job_without_its_message_holds_no_partition(
    database_url: str,
) -> None:
    old_partition(database_url, DAYS_AGO, "inbox.job")
    with psycopg.connect(database_url) as connection:
        connection.execute(
            load("inbox", "cancel_job"),
            {"id": id_of(noon()), "at": noon(), "consumer": "x", "reason": "a test"},
        )

    run_upkeep(database_url)

    assert execute(database_url, LEFT, ("inbox.job",)) == []
