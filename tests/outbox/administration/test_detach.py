"""pg_cron or the command detaches, checks again and drops, blocking nobody."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from outbox.administration.upkeep import APPLICATION_NAME, maintain, plan_upkeep
from outbox.errors import UpkeepError
from outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from tests.fixtures.positions import publish, replay
from tests.fixtures.sessions import execute
from tests.fixtures.upkeep import run_upkeep
from tests.fixtures.waiting import wait_for
from tests.outbox.administration.retiring import (
    EXPIRED,
    NOTED,
    PENDING,
    about_messages,
    acting_as,
    reader,
    steps,
)
from tests.outbox.administration.test_upkeep import add_old, old_partition

AHEAD = (
    "SELECT partition::text FROM outbox.partitions('outbox.message')"
    " WHERE starts_at = date_trunc('day', now(), 'UTC') + 3 * interval '24 hours'"
)


@pytest.fixture
def dba(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """Return a session with the privileges of the maintainer and of the owner."""
    with psycopg.connect(
        database_url, autocommit=True, application_name=APPLICATION_NAME
    ) as connection:
        yield connection


def test_the_command_detaches_and_drops_expired_partitions(
    database_url: str, dba: psycopg.Connection[Any]
) -> None:
    for days in (20, 25):
        old_partition(database_url, days)
    add_old(database_url, 25)
    told: list[str] = []

    maintain(dba, report=told.append)

    assert len(execute(database_url, EXPIRED)) == 1
    lines = [line.partition(": ")[2] for line in about_messages(told)]
    assert lines == ["detached", "dropped"]
    assert execute(database_url, NOTED) == []
    assert steps(database_url, "detach", "hold", table=None) == ["hold"]


def test_writers_continue_while_a_detach_waits_for_a_reader(
    database_url: str, dba: psycopg.Connection[Any]
) -> None:
    old_partition(database_url)
    with reader(database_url) as reading:
        upkeep = threading.Thread(
            target=maintain, args=(dba,), kwargs={"report": print}
        )
        upkeep.start()
        wait_for("detach", lambda: execute(database_url, PENDING))
        execute(
            database_url,
            "SET statement_timeout = '5s'; SELECT outbox.add('t', '{}'::jsonb)",
        )
        # Another upkeep must not finalize it: that would overtake the reader.
        execute(database_url, "CALL outbox.maintain()")
        assert execute(database_url, PENDING) == [(1,)]
        assert upkeep.is_alive()
        reading.rollback()
        upkeep.join(30)

    assert execute(database_url, EXPIRED) == []
    assert execute(database_url, NOTED) == []


def test_a_detach_that_waited_too_long_is_finalized_and_dropped_by_the_next_run(
    database_url: str, dba: psycopg.Connection[Any]
) -> None:
    old_partition(database_url)
    old_partition(database_url, 25)
    told: list[str] = []
    with reader(database_url):
        maintain(dba, report=told.append, detach_wait=timedelta(milliseconds=500))
    assert "the next run continues" in told[0]
    assert steps(database_url, "finalize", "detach") == ["finalize", "detach"]

    maintain(dba, report=told.append)

    assert execute(database_url, EXPIRED) == []
    health = execute(
        database_url,
        "SELECT detach_pending FROM outbox.partition_health"
        " WHERE parent_table = 'outbox.message'",
    )
    assert health == [(0,)]


def test_an_interrupted_detach_is_finalized_by_the_routines_alone(
    database_url: str, dba: psycopg.Connection[Any]
) -> None:
    old_partition(database_url)
    with reader(database_url):
        maintain(dba, report=lambda _: None, detach_wait=timedelta(milliseconds=500))

    with acting_as(database_url, "pillarbox_maintainer") as maintainer:
        maintainer.execute("CALL outbox.maintain()")

    assert execute(database_url, EXPIRED) == []
    assert execute(database_url, NOTED) == []


def leave_detached(url: str) -> str:
    """Leave the state of a run that was killed between its detach and its drop."""
    old_partition(url)
    add_old(url, outcome="published")
    with psycopg.connect(url, autocommit=True) as connection:
        (step,) = (s for s in plan_upkeep(connection) if s.step == "detach")
        connection.execute(
            "INSERT INTO outbox.retiring_partition"
            " VALUES (%s, %s, %s, %s, now(), 'pillarbox maintain')",
            (step.partition, step.parent_table, step.starts_at, step.ends_at),
        )
        connection.execute(step.statement.encode())
    assert step.partition is not None
    return step.partition


def test_a_table_that_was_left_detached_is_dropped(
    database_url: str,
) -> None:
    name = leave_detached(database_url)
    assert steps(database_url, "drop") == ["drop"]

    with acting_as(database_url, "pillarbox_maintainer") as maintainer:
        maintainer.execute("CALL outbox.maintain()")

    assert execute(database_url, f"SELECT to_regclass('{name}')") == [(None,)]
    assert execute(database_url, NOTED) == []


def test_a_row_that_became_unsettled_brings_its_partition_back(
    database_url: str, dba: psycopg.Connection[Any]
) -> None:
    name = leave_detached(database_url)
    replay(database_url, table=name)
    assert steps(database_url, "attach") == ["attach"]
    told: list[str] = []

    maintain(dba, report=told.append)

    assert told == [f"{name}: attached again"]
    assert execute(database_url, EXPIRED) == [(name,)]
    assert steps(database_url, "attach", "detach", "hold") == ["hold"]
    # It is an ordinary partition again: its rows can be settled through the parent.
    publish(database_url)
    maintain(dba, report=told.append)
    assert about_messages(told)[1:] == [f"{name}: detached", f"{name}: dropped"]
    assert execute(database_url, EXPIRED) == []


def test_a_detached_table_in_use_is_dropped_later(
    database_url: str, dba: psycopg.Connection[Any]
) -> None:
    name = leave_detached(database_url)
    told: list[str] = []
    with psycopg.connect(database_url) as connection:
        connection.execute(f"SELECT count(*) FROM {name}".encode())
        assert f"{name}: in use, and left for the next run" in run_upkeep(database_url)
        connection.rollback()

    maintain(dba, report=told.append)

    assert about_messages(told)[-1] == f"{name}: dropped"


def test_who_may_not_detach_is_refused_after_everything_else_was_done(
    database_url: str,
) -> None:
    old_partition(database_url)
    ((ahead,),) = execute(database_url, AHEAD)
    execute(database_url, f"DROP TABLE {ahead}")
    with acting_as(database_url, "pillarbox_maintainer") as maintainer:
        with pytest.raises(UpkeepError, match="can SET ROLE pillarbox_owner"):
            maintain(maintainer, report=lambda _: None)

        assert execute(database_url, AHEAD) == [(ahead,)]
        assert len(execute(database_url, EXPIRED)) == 1
        with acting_as(database_url, "pillarbox_detacher") as detacher:
            maintain(detacher, report=lambda _: None)
        maintain(maintainer, report=lambda _: None)

    assert execute(database_url, EXPIRED) == []


def test_a_longer_retention_keeps_a_partition_that_was_to_be_dropped(
    database_url: str, dba: psycopg.Connection[Any]
) -> None:
    old_partition(database_url)
    execute(database_url, "CALL outbox.maintain()")
    execute(database_url, "UPDATE outbox.partition_policy SET retention = '60 days'")

    maintain(dba, report=print)

    assert len(execute(database_url, EXPIRED)) == 1
    assert execute(database_url, NOTED) == []


def test_two_concurrent_commands_do_not_conflict(
    database_url: str, dba: psycopg.Connection[Any]
) -> None:
    with psycopg.connect(database_url, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(%s, %s)", (LOCK_CLASS, Lock.UPKEEP))
        with pytest.raises(UpkeepError, match="another pillarbox maintain is running"):
            maintain(dba, report=print)
