"""Exactly the messages that are still to be published hold their partition."""

from datetime import UTC

import psycopg
import pytest

from tests.fixtures.positions import (
    REPLAY,
    Cause,
    count_holding,
    defer,
    publish,
    replay,
)
from tests.fixtures.sessions import execute
from tests.outbox.administration.test_upkeep import add_old, old_partition

MANY = """
INSERT INTO outbox.message (id, created_at, lane, topic, content_type, payload)
SELECT gen_random_uuid(),
       -- All on one day.
       greatest(now() - n * interval '1 millisecond', day), n %% 48, 't', 'c', ''
  FROM generate_series(1, %s) AS n, date_trunc('day', now(), 'UTC') AS day
"""
ONE_BY_HAND = """
INSERT INTO outbox.message (id, seq, lane, topic, content_type, payload)
VALUES (outbox.uuid7(), 1, 0, 'by hand', 'c', '') RETURNING id
"""
PASSED = """
INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages, lane,
                             reader, owner, snapshot)
SELECT created_at, ends_at, number + 1, up_to, 0, lane, reader, owner,
       pg_current_snapshot()
  FROM outbox.position WHERE lane = 0
"""
ENTRY = """
INSERT INTO outbox.deferral (created_at, due_at, seq, id, lane, run, cause, key)
SELECT created_at, {}, seq, id, lane, {}, '{}', 'k'
  FROM outbox.message ORDER BY seq LIMIT 1
"""
SETTLED = """
INSERT INTO outbox.deferral (created_at, seq, id, lane, run, cause, outcome)
SELECT created_at, seq, id, lane, {}, 'settled', 'published'
  FROM outbox.message ORDER BY seq LIMIT 1
"""
FIRST = "SELECT id FROM outbox.message ORDER BY seq LIMIT 1"
SHOWN = """
SELECT u.id FROM outbox.partitions('outbox.message') AS p,
       outbox.unsettled_messages(p.partition, p.starts_at, p.ends_at) AS u
"""
CAUSE = SHOWN.replace("u.id", "u.cause")
STATEMENT = "SELECT statement FROM outbox.upkeep_plan('outbox.message')"


@pytest.fixture
def settled(database_url: str) -> str:
    """Return a database with many settled messages."""
    execute(database_url, MANY, (3000,))
    publish(database_url)
    assert count_holding(database_url) == 0
    return database_url


def test_one_message_that_is_not_claimed_is_found_among_many(settled: str) -> None:
    added = execute(settled, "SELECT outbox.add('t', '{}'::jsonb)")

    assert execute(settled, SHOWN) == added
    assert execute(settled, CAUSE) == [("unclaimed",)]


def test_a_row_inserted_by_hand_below_the_position_is_found(settled: str) -> None:
    by_hand = execute(settled, ONE_BY_HAND)

    assert execute(settled, SHOWN) == by_hand
    assert execute(settled, CAUSE) == [("inserted late",)]
    publish(settled)
    assert count_holding(settled) == 0


def test_a_message_that_was_covered_without_being_claimed_is_found(
    settled: str,
) -> None:
    """A position counts the messages of its claim."""
    by_hand = execute(settled, ONE_BY_HAND)
    execute(settled, PASSED)

    assert execute(settled, SHOWN) == by_hand
    assert execute(settled, CAUSE) == [("passed",)]

    defer(settled, "replayed", "topic = 'by hand'")
    publish(settled)
    assert count_holding(settled) == 0


def test_any_message_of_a_lane_can_be_one_that_was_not_claimed(settled: str) -> None:
    execute(
        settled,
        "UPDATE outbox.position SET messages = messages - 1 WHERE lane = 0",
    )

    assert count_holding(settled) == 3000 // 48
    assert set(execute(settled, CAUSE)) == {("passed",)}


@pytest.mark.parametrize("cause", ["scheduled", "refused", "postponed", "blocked"])
def test_a_waiting_message_is_found_until_its_run_is_settled(
    cause: Cause, settled: str
) -> None:
    added = execute(settled, "SELECT outbox.add('t', '{}'::jsonb, key => 'k')")
    defer(settled, cause)

    assert execute(settled, SHOWN) == added

    publish(settled)
    assert count_holding(settled) == 0


def test_a_replay_is_found_until_its_own_run_is_settled(settled: str) -> None:
    for run in (1, 2):
        execute(settled, ENTRY.format("now()", run, "replayed"))
        assert execute(settled, SHOWN) == execute(settled, FIRST)
        execute(settled, ENTRY.format("now()", run, "refused"))
        assert execute(settled, SHOWN) == execute(settled, FIRST)

        execute(settled, SETTLED.format(run))
        assert count_holding(settled) == 0


def test_a_log_entry_without_its_message_holds_nothing(settled: str) -> None:
    execute(settled, ENTRY.format("now()", 1, "replayed"))
    execute(
        settled,
        "DELETE FROM outbox.message WHERE seq = (SELECT min(seq) FROM outbox.message)",
    )

    assert count_holding(settled) == 0


def test_at_most_a_thousand_messages_are_counted(settled: str) -> None:
    execute(settled, REPLAY)
    assert count_holding(settled) == 1000


def test_the_plan_says_what_holds_a_partition_and_since_when(
    database_url: str,
) -> None:
    old_partition(database_url)
    for _ in range(3):
        add_old(database_url)
    old = "created_at < now() - interval '7 days'"
    defer(
        database_url,
        "refused",
        f"{old} AND seq = (SELECT min(seq) FROM outbox.message)",
    )

    ((reason, unsettled),) = execute(
        database_url,
        "SELECT reason, unsettled FROM outbox.upkeep_plan() WHERE step = 'hold'",
    )

    ((first, since),) = execute(
        database_url,
        "SELECT (array_agg(id ORDER BY created_at))[1]::text,"
        f" min(created_at) FROM outbox.message WHERE {old}",
    )
    assert unsettled == 3
    moment = since.astimezone(UTC)
    assert reason.startswith(
        "unsettled rows: 3 (refused, unclaimed), for example"
        f" {first} of {moment:%Y-%m-%dT%H:%M:%S}"
    )


def test_a_held_partition_is_checked_once(database_url: str) -> None:
    old_partition(database_url)
    add_old(database_url)

    with psycopg.connect(database_url) as connection:
        connection.execute("SET track_functions = 'all'")
        plan = "SELECT unsettled FROM outbox.upkeep_plan() WHERE step = 'hold'"
        assert connection.execute(plan).fetchall() == [(1,)]
        calls = connection.execute(
            "SELECT calls FROM pg_stat_xact_user_functions"
            " WHERE funcname = 'unsettled_messages'"
        ).fetchall()

    assert calls == [(1,)]


def test_the_plan_shows_the_messages_that_hold_a_partition(database_url: str) -> None:
    old_partition(database_url)
    add_old(database_url)
    add_old(database_url, outcome="published")

    ((statement,),) = execute(database_url, STATEMENT)

    (shown,) = execute(database_url, statement)
    assert shown[0] in [i for (i,) in execute(database_url, SHOWN)]
    publish(database_url)
    replay(database_url)
    assert len(execute(database_url, statement)) == 2
