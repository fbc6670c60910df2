"""Hourly, daily and weekly partitions are premade, kept, dropped and changed."""

from collections.abc import Callable
from typing import Any, TypeAlias

import psycopg
import pytest

from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.partitions import draw_timeline, read_partitions
from pillarbox.outbox.administration.retention import change_policy
from tests.fixtures.days import make_partitions_at
from tests.fixtures.doctor import Doctor
from tests.fixtures.positions import publish
from tests.fixtures.postgres import WITHOUT_PARTMAN
from tests.fixtures.sessions import execute
from tests.fixtures.upkeep import run_upkeep
from tests.outbox.administration.retiring import EXPIRED

pytestmark = pytest.mark.timeout(300)

Change: TypeAlias = Callable[..., None]
CheckHealth: TypeAlias = Callable[[], None]
UNITS = {"hourly": "hour", "daily": "day", "weekly": "week"}
PREMAKE = {"hourly": 48, "daily": 7, "weekly": 4}
# From daily partitions, which each table has at first, and back to them.
EACH_AFTER_EACH = ("hourly", "weekly", "hourly", "daily", "weekly", "daily", "daily")
PARTITIONS = """
SELECT partition::text, starts_at, ends_at, ends_at - starts_at, starts_at > now()
  FROM outbox.partitions('outbox.message') ORDER BY starts_at
"""
GAPS = """
SELECT * FROM (SELECT starts_at, lag(ends_at) OVER (ORDER BY starts_at) AS before
                 FROM outbox.partitions('outbox.message')) AS x
 WHERE starts_at <> before
"""
HEALTH = """
SELECT ahead >= premake, has_today, gaps, defaults, owners
  FROM outbox.partition_health WHERE parent_table = 'outbox.message'
"""
# New partitions have the new width once the current hour, day and week are over.
OFF = """
SELECT x.* FROM outbox.partitions('outbox.message') x
 WHERE x.starts_at <> date_trunc(%s, x.starts_at, 'UTC')
    OR x.ends_at - x.starts_at <> ('1 ' || %s)::interval
"""
PLAN = "SELECT step FROM outbox.upkeep_plan() WHERE parent_table = 'outbox.message'"
HOUR = "SELECT date_trunc('hour', now())"
NEXT = "SELECT date_trunc('week', now(), 'UTC') + 7 * interval '24 hours'"


@pytest.fixture
def change(database_url: str) -> Change:
    def run(interval: str, **more: Any) -> None:
        with administration(database_url, application_name="test") as connection:
            change_policy(connection, "outbox.message", interval=interval, **more)

    return run


@pytest.fixture
def check_health(database_url: str) -> Callable[[], None]:
    """Check that nothing is missing; run the upkeep first if a new hour has begun."""
    hour = execute(database_url, HOUR)

    def check() -> None:
        nonlocal hour
        while True:
            if (now := execute(database_url, HOUR)) != hour:
                hour = now
                run_upkeep(database_url)
            found = [execute(database_url, query) for query in (HEALTH, GAPS, PLAN)]
            execute(database_url, "SELECT outbox.add('t', '{}'::jsonb)")
            if execute(database_url, HOUR) == hour:
                break
        assert found == [[(True, True, 0, 0, 1)], [], []]

    return check


@pytest.mark.long
def test_one_interval_follows_another_without_a_gap(
    database_url: str, change: Change, check_health: CheckHealth, doctor: Doctor
) -> None:
    config = (
        "SELECT partition_interval::interval, datetime_string FROM partman.part_config"
        " WHERE parent_table = 'outbox.message'"
    )
    configured = None if WITHOUT_PARTMAN else execute(database_url, config)
    daily = execute(database_url, PARTITIONS)
    for new in EACH_AFTER_EACH:
        before = execute(database_url, PARTITIONS)

        change(new)
        check_health()
        run_upkeep(database_url)
        check_health()

        after = execute(database_url, PARTITIONS)
        past = [row for row in before if not row[4]]
        assert after[: len(past)] == past
        ahead = [row for row in after if row[4]]
        # From next week at the latest, all partitions have the new width.
        ((next_week,),) = execute(database_url, NEXT)
        unit = UNITS[new]
        odd = execute(database_url, OFF, (unit, unit))
        assert all(row[2] <= next_week for row in odd)
        assert ahead[-1] not in odd
        # One fewer if one of them has become the current partition meanwhile.
        assert len(ahead) >= PREMAKE[new] - 1
        publish(database_url)
        assert doctor(database_url)[1] == []

    # Back at daily partitions, pg_partman's configuration and the names are the same.
    assert configured is None or execute(database_url, config) == configured
    names = {row[0] for row in execute(database_url, PARTITIONS)}
    assert {row[0] for row in daily} <= names


def test_a_lost_day_in_a_week_of_days_is_refused(
    database_url: str, change: Change, doctor: Doctor
) -> None:
    """A whole week would overlap the days that are left."""
    yesterday = make_partitions_at("outbox.message", "ARRAY[now() - interval '1 day']")
    execute(database_url, yesterday.decode())
    change("weekly")
    today = (
        "SELECT partition::text FROM outbox.partitions('outbox.message')"
        " WHERE starts_at <= now() AND ends_at > now()"
    )
    ((name,),) = execute(database_url, today)
    execute(database_url, f"DROP TABLE {name}")

    with pytest.raises(psycopg.Error, match=r"overlap|created no partition"):
        execute(database_url, "SELECT outbox.make_partitions('outbox.message')")
    _, findings = doctor(database_url)
    assert any("and today's is among them" in str(found) for found in findings)


def test_hours_are_made_shown_dropped_and_held_individually(
    database_url: str, change: Change, check_health: CheckHealth
) -> None:
    change("hourly")
    *_, third, _, last = (row[0] for row in execute(database_url, PARTITIONS))
    for name in (last, third):
        execute(database_url, f"DROP TABLE {name}")
    old_hours = (
        "SELECT outbox.make_partition('outbox.message', date_trunc('hour',"
        " now() - n * interval '1 week')) FROM generate_series(5, 6) AS n"
    )
    execute(f"{database_url}?options=-crole%3Dpillarbox_owner", old_hours)
    execute(
        database_url,
        "INSERT INTO outbox.message (id, created_at, lane, topic, content_type,"
        " payload) SELECT outbox.uuid7(), min(starts_at), 0, 't', 'c', ''"
        " FROM outbox.partitions('outbox.message')",
    )
    assert len(execute(database_url, EXPIRED)) == 2

    run_upkeep(database_url)

    assert {third, last} <= {row[0] for row in execute(database_url, PARTITIONS)}
    assert len(execute(database_url, EXPIRED)) == 1
    publish(database_url)
    run_upkeep(database_url)
    assert execute(database_url, EXPIRED) == []
    check_health()
    with administration(database_url, application_name="test") as connection:
        connection.execute("SET timezone = 'UTC'")
        drawn = [
            line
            for policy, partitions in read_partitions(connection).items()
            if policy.parent_table == "outbox.message"
            for line in draw_timeline(policy, partitions)
        ]
    assert ":00  ahead" in drawn[-1]
    assert " partitions" in drawn[-1]


@pytest.mark.week
def test_rows_ahead_are_never_dropped(database_url: str, change: Change) -> None:
    execute(
        database_url,
        "INSERT INTO outbox.message (id, created_at, lane, topic, content_type,"
        " payload) SELECT outbox.uuid7(), max(starts_at), 0, 't', 'c', ''"
        " FROM outbox.partitions('outbox.message')",
    )
    before = execute(database_url, PARTITIONS), policy(database_url)

    with pytest.raises(
        Exception, match=r"future partition .* has rows.*a clock that is ahead"
    ):
        change("weekly")

    assert (execute(database_url, PARTITIONS), policy(database_url)) == before


def policy(url: str) -> list[Any]:
    return execute(url, "TABLE outbox.partition_policy")


def test_a_change_waits_only_briefly_for_an_open_transaction(
    database_url: str, change: Change, check_health: CheckHealth
) -> None:
    before = policy(database_url)
    with psycopg.connect(database_url) as reader:
        reader.execute("SELECT count(*) FROM outbox.message")
        with pytest.raises(
            Exception, match="a transaction is using the table; try again"
        ):
            change("hourly")
        reader.rollback()

    assert policy(database_url) == before
    change("hourly")
    check_health()
