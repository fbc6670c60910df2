"""pg_cron or the command detaches, checks again and drops, blocking nobody."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from outbox.administration.upkeep import APPLICATION_NAME, maintain, plan_upkeep
from outbox.dead_letters import RetrySchedule
from outbox.errors import UpkeepError
from outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from relay.config import RelayConfig
from relay.dead_letters.retry import PublishingRetrier
from tests.fixtures.marks import publish, replay
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.outbox.administration.retiring import (
    EXPIRED,
    PENDING,
    RETIRING,
    about_messages,
    acting_as,
    reader,
    steps,
)
from tests.outbox.administration.test_upkeep import add_old, old_partition


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

    maintain(dba, tell=told.append)

    assert len(execute(database_url, EXPIRED)) == 1
    lines = [line.partition(": ")[2] for line in about_messages(told)]
    assert lines == ["detached", "dropped"]
    assert execute(database_url, RETIRING) == []
    assert steps(database_url, "detach", "hold", table=None) == ["hold"]


def test_writers_continue_while_a_detach_waits_for_a_reader(
    database_url: str, dba: psycopg.Connection[Any]
) -> None:
    old_partition(database_url)
    with reader(database_url) as reading:
        upkeep = threading.Thread(target=maintain, args=(dba,), kwargs={"tell": print})
        upkeep.start()
        wait_for("detach", lambda: execute(database_url, PENDING))
        execute(
            database_url,
            "SET statement_timeout = '5s'; SELECT outbox.add('t', '{}'::jsonb)",
        )
        # Another upkeep must not finalize it: that would overtake the reader.
        execute(database_url, "CALL outbox.maintain(patience => '6 hours')")
        assert execute(database_url, PENDING) == [(1,)]
        assert upkeep.is_alive()
        reading.rollback()
        upkeep.join(30)

    assert execute(database_url, EXPIRED) == []
    assert execute(database_url, RETIRING) == []


def test_a_detach_that_waited_too_long_is_finalized_and_dropped_by_the_next_run(
    database_url: str, dba: psycopg.Connection[Any]
) -> None:
    old_partition(database_url)
    old_partition(database_url, 25)
    told: list[str] = []
    with reader(database_url):
        maintain(dba, tell=told.append, detach_wait=timedelta(milliseconds=50))
    assert "the next run continues" in told[0]
    assert steps(database_url, "finalize", "detach") == ["finalize", "detach"]

    maintain(dba, tell=told.append)

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
        maintain(dba, tell=lambda _: None, detach_wait=timedelta(milliseconds=50))

    with acting_as(database_url, "pillarbox_maintainer") as maintainer:
        maintainer.execute("CALL outbox.maintain(patience => '6 hours')")

    assert execute(database_url, EXPIRED) == []
    assert execute(database_url, RETIRING) == []


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
        maintainer.execute("CALL outbox.maintain(patience => '6 hours')")

    assert execute(database_url, f"SELECT to_regclass('{name}')") == [(None,)]
    assert execute(database_url, RETIRING) == []


def test_a_row_that_became_unsettled_brings_its_partition_back(
    database_url: str, dba: psycopg.Connection[Any]
) -> None:
    name = leave_detached(database_url)
    replay(database_url, table=name)
    assert steps(database_url, "attach") == ["attach"]
    told: list[str] = []

    maintain(dba, tell=told.append)

    assert told == [f"{name}: attached again"]
    assert execute(database_url, EXPIRED) == [(name,)]
    assert steps(database_url, "attach", "detach", "hold") == ["hold"]
    # It is an ordinary partition again: its rows can be settled through the parent.
    publish(database_url)
    maintain(dba, tell=told.append)
    assert about_messages(told)[1:] == [f"{name}: detached", f"{name}: dropped"]
    assert execute(database_url, EXPIRED) == []


def test_a_detached_table_in_use_is_dropped_later(
    database_url: str, dba: psycopg.Connection[Any]
) -> None:
    name = leave_detached(database_url)
    told: list[str] = []
    with psycopg.connect(database_url) as connection:
        connection.execute(f"SELECT count(*) FROM {name}".encode())
        with pytest.raises(psycopg.Error, match=f"drop of {name}: no lock in 1 tries"):
            execute(database_url, "CALL outbox.maintain(max_tries => 1)")
        connection.rollback()

    maintain(dba, tell=told.append)

    assert about_messages(told)[-1] == f"{name}: dropped"


def test_a_maintainer_unable_to_detach_concurrently_uses_lock_and_retry(
    database_url: str,
) -> None:
    old_partition(database_url)
    with acting_as(database_url, "pillarbox_maintainer") as maintainer:
        maintain(maintainer, tell=lambda _: None)

    assert execute(database_url, EXPIRED) == []


def test_a_partition_whose_detach_is_queued_is_left_to_it(
    database_url: str,
) -> None:
    old_partition(database_url)
    with acting_as(database_url, "pillarbox_maintainer") as maintainer:
        maintainer.execute("CALL outbox.maintain(patience => '6 hours')")
        assert len(execute(database_url, EXPIRED)) == 1
        assert len(execute(database_url, RETIRING)) == 1
        execute(
            database_url,
            "UPDATE outbox.retiring_partition"
            " SET planned_at = planned_at - interval '7 hours'",
        )
        maintainer.execute("CALL outbox.maintain(patience => '6 hours')")

    assert execute(database_url, EXPIRED) == []


def test_a_longer_retention_keeps_a_partition_that_was_to_be_dropped(
    database_url: str, dba: psycopg.Connection[Any]
) -> None:
    old_partition(database_url)
    execute(database_url, "CALL outbox.maintain(patience => '6 hours')")
    execute(database_url, "UPDATE outbox.partition_policy SET retention = '60 days'")

    maintain(dba, tell=print)

    assert len(execute(database_url, EXPIRED)) == 1
    assert execute(database_url, RETIRING) == []


def test_two_concurrent_commands_do_not_conflict(
    database_url: str, dba: psycopg.Connection[Any]
) -> None:
    with psycopg.connect(database_url, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(%s, %s)", (LOCK_CLASS, Lock.UPKEEP))
        with pytest.raises(UpkeepError, match="another pillarbox maintain is running"):
            maintain(dba, tell=print)


async def test_the_command_does_not_wait_for_the_relays_dead_letters(
    database_url: str, dba: psycopg.Connection[Any]
) -> None:
    async with AsyncExitStack() as stack:
        retrier = PublishingRetrier(
            *(database_url, ScriptedPublisher, RelayConfig(), RetrySchedule()),
            notify=print,
            stack=stack,
        )
        async with retrier.alone() as taken:
            assert taken
            await asyncio.to_thread(maintain, dba, tell=print)
