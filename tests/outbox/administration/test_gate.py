"""Exactly the messages that are still to be published hold their partition."""

from datetime import UTC
from typing import Any

import psycopg
import pytest

from tests.fixtures.marks import (
    REPLAY,
    Cause,
    count_holding,
    defer,
    publish,
    replay,
    verify,
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


@pytest.fixture(params=[True, False], ids=["verified", "not verified"])
def settled(request: pytest.FixtureRequest, database_url: str) -> str:
    """Return a database with many settled messages, with or without watermarks."""
    execute(database_url, MANY, (3000,))
    publish(database_url)
    if request.param:
        verify(database_url)
    assert count_holding(database_url) == 0
    return database_url


def test_one_message_without_a_mark_is_found_among_many(settled: str) -> None:
    added = execute(settled, "SELECT outbox.add('t', '{}'::jsonb)")

    assert execute(settled, SHOWN) == added


def test_a_row_inserted_by_hand_below_the_watermark_is_found(settled: str) -> None:
    by_hand = execute(settled, ONE_BY_HAND)

    assert execute(settled, SHOWN) == by_hand
    verified = execute(settled, "SELECT 1 FROM outbox.watermark LIMIT 1")
    ((cause,),) = execute(settled, CAUSE)
    assert cause == ("inserted late" if verified else "unclaimed")
    publish(settled)
    assert count_holding(settled) == 0


@pytest.mark.parametrize("cause", ["scheduled", "refused", "postponed", "blocked"])
def test_a_waiting_message_is_found_until_its_run_is_settled(
    cause: Cause, settled: str
) -> None:
    added = execute(settled, "SELECT outbox.add('t', '{}'::jsonb, key => 'k')")
    defer(settled, cause)
    if execute(settled, "SELECT 1 FROM outbox.watermark LIMIT 1"):
        verify(settled)

    assert execute(settled, SHOWN) == added

    publish(settled)
    assert count_holding(settled) == 0


def test_a_mark_that_comes_after_a_refusal_settles_the_message(settled: str) -> None:
    execute(settled, ENTRY.format("now()", 0, "refused"))

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


def watermark(url: str, *, cluster: str = "outbox.cluster()", **values: Any) -> None:
    execute(
        url,
        "INSERT INTO outbox.watermark (created_at, above, up_to, messages, lane,"
        " cluster) SELECT date_trunc('day', now(), 'UTC'), %(above)s, %(up_to)s,"
        f" %(messages)s, min(lane), {cluster} FROM outbox.message",
        values,  # type: ignore[arg-type]  # psycopg takes names, too
    )


def test_a_watermark_of_another_cluster_does_not_count(database_url: str) -> None:
    execute(database_url, "SELECT outbox.add('t', '{}'::jsonb)")
    watermark(database_url, above=-1, up_to=99, messages=1, cluster="'another/1'")
    assert count_holding(database_url) == 1

    watermark(database_url, above=-1, up_to=99, messages=1)

    # A watermark of this cluster counts: its writer has seen the mark.
    assert count_holding(database_url) == 0


def test_overlapping_stretches_count_no_message_twice(database_url: str) -> None:
    for _ in range(2):
        execute(database_url, "SELECT outbox.add('t', '{}'::jsonb, key => 'k')")
    watermark(database_url, above=-1, up_to=50, messages=1)
    watermark(database_url, above=20, up_to=60, messages=1)

    assert count_holding(database_url) == 2


@pytest.mark.parametrize("seq", [-7, 0, 2, 9, 40, 99], ids=str)
def test_a_row_is_found_within_between_and_around_the_stretches(
    seq: int, database_url: str
) -> None:
    row = (
        "INSERT INTO outbox.message (id, seq, lane, topic, content_type, payload)"
        " VALUES (outbox.uuid7(), %s, 7, 't', 'c', '') RETURNING id"
    )
    for known in (3, 5, 8, 30, 31):
        execute(database_url, row, (known,))
    publish(database_url)
    watermark(database_url, above=-1, up_to=5, messages=2)
    watermark(database_url, above=5, up_to=10, messages=1)
    watermark(database_url, above=20, up_to=31, messages=2)
    assert count_holding(database_url) == 0

    by_hand = execute(database_url, row, (seq,))

    assert execute(database_url, SHOWN) == by_hand


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
    assert "3 unsettled rows (2 unclaimed, 1 refused), the oldest " in reason
    moment = since.astimezone(UTC)
    assert f", the oldest {first} of {moment:%Y-%m-%d %H:%M:%S}" in reason


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
