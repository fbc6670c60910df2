"""Without a concurrent detach, the lock is brief and not held during a scan."""

import threading

import psycopg
import pytest

from tests.fixtures.marks import replay
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.outbox.administration.retiring import EXPIRED, RETIRING, reader, steps
from tests.outbox.administration.test_upkeep import add_old, old_partition

DETACH = "SELECT outcome FROM outbox.detach_expired('outbox.message', '{}', '0')"
WAITS = (
    "SELECT 1 FROM pg_locks WHERE relation = '{}'::regclass AND NOT granted"
    " AND mode = 'AccessExclusiveLock'"
)
ADD = "SET statement_timeout = '5s'; SELECT outbox.add('t', '{}'::jsonb)"


@pytest.fixture
def partition(database_url: str) -> str:
    """Return an expired partition whose only row is settled."""
    old_partition(database_url)
    add_old(database_url, outcome="published")
    ((name,),) = execute(database_url, EXPIRED)
    return str(name)


def test_writers_do_not_wait_for_readers_of_the_partition(
    database_url: str, partition: str
) -> None:
    # Without a timeout, there is time to observe the wait.
    execute(
        database_url,
        "ALTER FUNCTION outbox.detach_expired(text, regclass[], interval)"
        " RESET lock_timeout",
    )
    with reader(database_url) as reading:
        upkeep = threading.Thread(target=execute, args=(database_url, DETACH))
        upkeep.start()
        waits = WAITS.format(partition)
        wait_for("the lock", lambda: execute(database_url, waits))
        execute(database_url, ADD)
        assert execute(database_url, waits) == [(1,)]
        reading.rollback()
        upkeep.join(60)

    assert execute(database_url, EXPIRED) == []


def test_a_command_waits_only_briefly_for_the_table_lock(
    database_url: str, partition: str
) -> None:
    with psycopg.connect(database_url) as reading:
        reading.execute("SELECT FROM ONLY outbox.message")
        assert execute(database_url, DETACH) == [("busy",)]
        reading.rollback()

    assert execute(database_url, EXPIRED) == [(partition,)]
    assert execute(database_url, RETIRING) == []


def test_partitions_detached_before_a_crash_are_dropped_by_the_next_run(
    database_url: str, partition: str
) -> None:
    assert execute(database_url, DETACH) == [("detached",)]
    assert steps(database_url, "drop", "detach") == ["drop"]

    execute(database_url, "CALL outbox.maintain()")

    assert execute(database_url, f"SELECT to_regclass('{partition}')") == [(None,)]
    assert execute(database_url, RETIRING) == []


def test_a_row_reopened_during_the_detach_brings_its_partition_back(
    database_url: str, partition: str
) -> None:
    execute(database_url, DETACH)
    replay(database_url, table=partition)

    execute(database_url, "CALL outbox.maintain()")

    assert execute(database_url, EXPIRED) == [(partition,)]
    assert steps(database_url, "drop", "attach", "hold") == ["hold"]


def test_all_expired_partitions_are_dropped_in_one_run(
    database_url: str, partition: str
) -> None:
    for days in range(30, 33):
        old_partition(database_url, days)
    add_old(database_url, 31)

    execute(database_url, "CALL outbox.maintain()")

    ((held,),) = execute(database_url, EXPIRED)
    assert held != partition
    assert execute(database_url, RETIRING) == []
