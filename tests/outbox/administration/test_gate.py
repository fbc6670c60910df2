"""Exactly the messages that are still to be published hold their partition."""

from datetime import UTC
from typing import Any, Final

import psycopg
import pytest

from tests.fixtures.positions import REPLAY, Cause, count_holding, defer, publish
from tests.fixtures.sessions import execute
from tests.outbox.administration.test_upkeep import add_old, old_partition

MANY: Final = """
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
PASSED: Final = """
INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages, lane,
                             reader, snapshot)
SELECT created_at, ends_at, number + 1, up_to, 0, lane, reader, pg_current_snapshot()
  FROM outbox.position WHERE lane = 0
"""
ENTRY: Final = """
INSERT INTO outbox.deferral (created_at, due_at, seq, id, lane, run, cause, key)
SELECT created_at, {}, seq, id, lane, {}, '{}', 'k'
  FROM outbox.message ORDER BY seq LIMIT 1
"""
SETTLED: Final = """
INSERT INTO outbox.deferral (created_at, seq, id, lane, run, cause, outcome)
SELECT created_at, seq, id, lane, {}, 'settled', 'published'
  FROM outbox.message ORDER BY seq LIMIT 1
"""
FIRST: Final = "SELECT id FROM outbox.message ORDER BY seq LIMIT 1"
HOLDING: Final = """
SELECT u.id, u.cause FROM outbox.partitions('outbox.message') AS p,
       outbox.unsettled_messages(p.partition, p.starts_at, p.ends_at) AS u
"""
WAITING: Final[tuple[Cause, ...]] = ("scheduled", "refused", "postponed", "blocked")


@pytest.fixture
def settled(database_url: str) -> str:
    """Return a database with many settled messages."""
    execute(database_url, MANY, (3000,))
    publish(database_url)
    assert holding(database_url) == {}
    return database_url


def holding(url: str) -> dict[Any, str]:
    """Return the ids of the messages that hold a partition, with the cause."""
    return dict(execute(url, HOLDING))


def test_each_open_message_is_found_among_many_until_it_is_settled(
    settled: str,
) -> None:
    ((by_hand,),) = execute(settled, ONE_BY_HAND)
    assert holding(settled) == {by_hand: "inserted late"}
    publish(settled)
    assert holding(settled) == {}

    ((added,),) = execute(settled, "SELECT outbox.add('t', '{}'::jsonb, key => 'k')")
    assert holding(settled) == {added: "unclaimed"}
    for cause in WAITING:
        defer(settled, cause)
        assert holding(settled) == {added: cause}
    publish(settled)
    assert holding(settled) == {}

    ((first,),) = execute(settled, FIRST)
    for run in (1, 2):
        for cause in ("replayed", "refused"):
            execute(settled, ENTRY.format("now()", run, cause))
            assert holding(settled) == {first: cause}
        execute(settled, SETTLED.format(run))
        assert holding(settled) == {}

    # An entry without its message holds nothing.
    execute(settled, ENTRY.format("now()", 3, "replayed"))
    execute(settled, "DELETE FROM outbox.message WHERE id = %s", (first,))
    assert holding(settled) == {}


def test_a_message_that_was_covered_without_being_claimed_is_found(
    settled: str,
) -> None:
    """A position counts the messages of its claim."""
    ((by_hand,),) = execute(settled, ONE_BY_HAND)
    execute(settled, PASSED)
    assert holding(settled) == {by_hand: "passed"}
    defer(settled, "replayed", "topic = 'by hand'")
    publish(settled)
    assert holding(settled) == {}


def test_any_message_of_a_lane_can_be_one_that_was_not_claimed(settled: str) -> None:
    execute(
        settled,
        "UPDATE outbox.position SET messages = messages - 1 WHERE lane = 0",
    )
    assert list(holding(settled).values()) == ["passed"] * (3000 // 48)

    # One that is known in another lane doesn't hide them.
    execute(settled, ONE_BY_HAND.replace("1, 0,", "1, 1,"))
    execute(settled, PASSED.replace("lane = 0", "lane = 1"))
    defer(settled, "replayed", "topic = 'by hand'")
    publish(settled)
    assert list(holding(settled).values()) == ["passed"] * (3000 // 48)

    execute(settled, REPLAY)
    # More than a thousand are not counted.
    assert count_holding(settled) == 1000


def test_the_plan_checks_a_held_partition_once_and_says_what_holds_it_since_when(
    database_url: str,
) -> None:
    old_partition(database_url)
    for _ in range(3):
        add_old(database_url)
    old = "created_at < now() - interval '7 days'"
    first_of_old = f"{old} AND seq = (SELECT min(seq) FROM outbox.message)"
    defer(database_url, "refused", first_of_old)

    with psycopg.connect(database_url) as connection:
        connection.execute("SET track_functions = 'all'")
        ((reason, unsettled, statement),) = connection.execute(
            "SELECT reason, unsettled, statement FROM outbox.upkeep_plan()"
            " WHERE step = 'hold'"
        ).fetchall()
        calls = connection.execute(
            "SELECT calls FROM pg_stat_xact_user_functions"
            " WHERE funcname = 'unsettled_messages'"
        ).fetchall()

    assert calls == [(1,)]
    assert unsettled == 3
    ((first, since),) = execute(
        database_url,
        "SELECT (array_agg(id ORDER BY created_at))[1]::text,"
        f" min(created_at) FROM outbox.message WHERE {old}",
    )
    moment = since.astimezone(UTC)
    assert reason.startswith(
        "unsettled rows: 3 (refused, unclaimed), for example"
        f" {first} of {moment:%Y-%m-%dT%H:%M:%S}"
    )
    assert {row[0] for row in execute(database_url, statement)} == set(
        holding(database_url)
    )
