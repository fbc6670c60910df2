"""Exactly the messages that are still to be published hold their partition."""

from datetime import UTC
from random import Random
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
TOPICS: Final = ("a", "a.b", "a.b.c", "ab", "a.\U0010ffff", "a.\U0010ffffz", "é", "z")
PATTERNS: Final = (*TOPICS, "*", "a*", "a.*", "a.\U0010ffff*", "é*", "b*")
ADD_ON_A_DAY: Final = """
INSERT INTO outbox.message (id, created_at, lane, topic, content_type, payload)
SELECT outbox.uuid7(), day + n * interval '1 second', 16 + n %% 3, %s, 'c', ''
  FROM generate_series(1, 7) AS n, date_trunc('day', now() + %s, 'UTC') AS day
"""
ADD_WITH_ANY_SEQ: Final = """
INSERT INTO outbox.message (id, seq, lane, topic, content_type, payload)
VALUES (outbox.uuid7(), %s, 17, %s, 'c', '')
"""
SUBSCRIBE: Final = """
WITH reader AS (INSERT INTO outbox.reader (reader) VALUES (%(reader)s))
INSERT INTO outbox.subscription (reader, topic, is_discarded, since, since_seq)
SELECT %(reader)s, topic, %(discards)s,
       CASE WHEN %(oldest)s THEN '1:1:' ELSE pg_current_snapshot() END,
       CASE WHEN %(oldest)s THEN -1
            ELSE coalesce(pg_sequence_last_value('outbox.message_seq'), -1) END
  FROM unnest(%(topics)s::text[]) AS topic
"""
END: Final = """
UPDATE outbox.subscription
   SET ended_at = date_trunc('day', now(), 'UTC') + %s WHERE reader = %s
"""
PASS: Final = """
INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages, lane,
                             reader, snapshot)
SELECT d.starts_at, d.ends_at, nextval('outbox.deferral_entry_seq'), %s, 0, %s, %s,
       pg_current_snapshot()
  FROM outbox.partitions('outbox.message') AS d
 WHERE d.starts_at = date_trunc('day', now() + %s, 'UTC')
"""
# As they are defined, message by message.
NOBODYS: Final = """
SELECT m.id FROM outbox.message AS m
 WHERE outbox.is_unrouted(m.topic, m.seq, m.xid, m.created_at)
"""
UNREAD: Final = """
SELECT m.id, r.reader
  FROM outbox.message AS m
  JOIN outbox.partitions('outbox.message') AS d
    ON m.created_at >= d.starts_at AND m.created_at < d.ends_at
 CROSS JOIN outbox.reader AS r
 WHERE EXISTS (SELECT FROM outbox.subscription AS s
                WHERE s.reader = r.reader
                  AND outbox.brings(s, m.topic, m.seq, m.xid, -1))
   AND coalesce((SELECT outbox.covers(p, m.seq, m.xid, -1) FROM outbox.position AS p
                  WHERE p.reader = r.reader AND p.lane = m.lane
                    AND p.created_at = d.starts_at
                  ORDER BY p.number DESC LIMIT 1), false) IS FALSE
"""


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


@pytest.mark.parametrize("seed", range(4))
def test_the_gate_of_readers_of_topics_finds_exactly_what_is_left(
    database_url: str, seed: int
) -> None:
    random = Random(seed)
    execute(database_url, END, ("-2 hours", "main"))
    readers: list[str] = []
    for number in range(60):
        day = random.choice(["0", "1 day"])
        match random.choice(["add", "add", "add", "by hand", "pass", "begin", "end"]):
            case "add":
                execute(database_url, ADD_ON_A_DAY, (random.choice(TOPICS), day))
            case "by hand":
                row = random.randrange(99), random.choice(TOPICS)
                execute(database_url, ADD_WITH_ANY_SEQ, row)
            case "begin":
                readers.append(f"reader-{number}")
                values = {
                    "reader": readers[-1],
                    "topics": random.sample(PATTERNS, random.randint(1, 2)),
                    "oldest": random.random() < 0.4,
                    "discards": random.random() < 0.2,
                }
                execute(database_url, SUBSCRIBE, values)
            case "pass" if readers:
                lane = random.choice([16, 17, 18])
                position = random.randrange(150), lane, random.choice(readers), day
                execute(database_url, PASS, position)
            case "end" if readers:
                when = f"{random.randrange(60)} seconds"
                execute(database_url, END, (when, random.choice(readers)))

    found = execute(
        database_url, HOLDING.replace("u.id, u.cause", "u.id, u.reader, u.cause")
    )
    nobodys = {id for (id,) in execute(database_url, NOBODYS)}
    assert {id for id, _, cause in found if cause == "unrouted"} == nobodys
    listed = execute(database_url, "SELECT id FROM outbox.unrouted_messages()")
    assert {id for (id,) in listed} == nobodys
    left = {(id, reader) for id, reader, cause in found if cause != "unrouted"}
    assert left == {*execute(database_url, UNREAD)}
