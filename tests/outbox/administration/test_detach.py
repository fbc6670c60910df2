"""pg_cron or the command detaches, checks again and drops, blocking nobody."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from pillarbox.outbox.administration.upkeep import APPLICATION_NAME, maintain
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.errors import UpkeepError
from tests.fixtures.positions import publish
from tests.fixtures.sessions import execute
from tests.fixtures.upkeep import run_upkeep
from tests.fixtures.waiting import wait_for
from tests.outbox.administration.retiring import (
    EXPIRED,
    NOTED,
    PENDING,
    about_messages,
    acting_as,
    leave_detached,
    leave_interrupted,
    reader,
    steps,
)
from tests.outbox.administration.test_upkeep import (
    add_old,
    drop_ahead,
    exists,
    old_partition,
)

ADD = "SET statement_timeout = '5s'; SELECT outbox.add('t', '{}'::jsonb)"


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
    database_url: str,
) -> None:
    old_partition(database_url)
    # The detach is recognized whatever the name of its session.
    named = f"{database_url}?application_name=nightly"
    with reader(database_url) as reading:
        upkeep = threading.Thread(
            target=main, args=(["maintain", "--database", named],)
        )
        upkeep.start()
        wait_for("detach", lambda: execute(database_url, PENDING))
        execute(database_url, ADD)
        # Another upkeep must not finalize it: that would overtake the reader.
        execute(database_url, "CALL outbox.maintain()")
        assert execute(database_url, PENDING) == [(1,)]
        assert upkeep.is_alive()
        reading.rollback()
        upkeep.join(60)

    assert execute(database_url, EXPIRED) == []
    assert execute(database_url, NOTED) == []


def test_a_detach_that_waited_too_long_is_finalized_and_dropped_by_the_next_run(
    database_url: str, dba: psycopg.Connection[Any]
) -> None:
    old_partition(database_url)
    old_partition(database_url, 25)
    told: list[str] = []
    briefly = timedelta(milliseconds=500)
    with reader(database_url):
        maintain(dba, report=told.append, detach_wait=briefly)
    assert "the next run continues" in told[0]
    assert steps(database_url, "finalize", "detach") == ["finalize", "detach"]

    with reader(database_url, "outbox.position"):
        maintain(dba, report=told.append, detach_wait=briefly)

    assert execute(database_url, EXPIRED) == []
    assert any("outbox.position" in t and "not detached yet" in t for t in told)
    maintain(dba, report=told.append)
    assert steps(database_url, "finalize", "detach", "drop", table=None) == []
    health = "SELECT DISTINCT detach_pending FROM outbox.partition_health"
    assert execute(database_url, health) == [(0,)]


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
    ahead = drop_ahead(database_url)
    with acting_as(database_url, "pillarbox_maintainer") as maintainer:
        with pytest.raises(UpkeepError, match="can SET ROLE pillarbox_owner"):
            maintain(maintainer, report=lambda _: None)

        assert exists(database_url, ahead)
        assert len(execute(database_url, EXPIRED)) == 1
        with acting_as(database_url, "pillarbox_detacher") as detacher:
            maintain(detacher, report=lambda _: None)
        maintain(maintainer, report=lambda _: None)

    assert execute(database_url, EXPIRED) == []


FINISH = "SELECT partition, outcome FROM outbox.finish_detached('outbox.message')"
COUNT = "SELECT count(*) FROM outbox.message"
# Holds a snapshot while it runs.
UNRELATED = "SELECT pg_sleep(%s)"
AT_WORK = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE state = 'active' AND wait_event = 'PgSleep'"
)
WAITS_FOR_A_SNAPSHOT = (
    "SELECT 1 FROM pg_locks WHERE locktype = 'virtualxid' AND NOT granted"
)


@contextmanager
def busy(url: str) -> Iterator[None]:
    """Run overlapping statements of a second each in two sessions."""
    stop = threading.Event()

    def work(first: float) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(UNRELATED, (first,))
            while not stop.is_set():
                connection.execute(UNRELATED, (1,))

    sessions = [threading.Thread(target=work, args=(first,)) for first in (0.5, 1)]
    for session in sessions:
        session.start()
    try:
        wait_for("both at work", lambda: execute(url, AT_WORK) == [(2,)])
        yield
    finally:
        stop.set()
        for session in sessions:
            session.join()


@contextmanager
def long_statement(url: str) -> Iterator[psycopg.Connection[Any]]:
    """Hold a snapshot until the transaction ends."""
    with psycopg.connect(url) as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT 1")
        yield connection
        connection.rollback()


def test_the_routines_wait_for_statements_of_other_sessions(
    database_url: str,
) -> None:
    interrupted = leave_interrupted(database_url)
    with busy(database_url):
        done = execute(database_url, FINISH)

    assert done == [(interrupted, "finalized"), (interrupted, "dropped")]


def test_writers_and_readers_continue_while_the_routines_finish_a_detach(
    database_url: str,
) -> None:
    interrupted = leave_interrupted(database_url)
    done: list[tuple[str, str]] = []

    def finish_it() -> None:
        done.extend(execute(database_url, FINISH))

    with long_statement(database_url) as working:
        routine = threading.Thread(target=finish_it)
        routine.start()
        wait_for("FINALIZE", lambda: execute(database_url, WAITS_FOR_A_SNAPSHOT))
        execute(database_url, ADD)
        publish(f"{database_url}?options=-cstatement_timeout%3D5s")
        assert execute(database_url, COUNT) == [(1,)]
        # Readers of the plan and older transactions don't wait either.
        assert steps(database_url, "finalize") == ["finalize"]
        assert working.execute(COUNT).fetchall() == [(0,)]
        working.rollback()
        routine.join(60)

    # It waits 5 s for others, which a busy machine may exceed.
    if done == [(interrupted, "waiting")]:
        done = execute(database_url, FINISH)
    assert done == [(interrupted, "finalized"), (interrupted, "dropped")]


def test_a_detach_is_not_finished_while_a_transaction_can_read_the_partition(
    database_url: str,
) -> None:
    with long_statement(database_url) as older:
        leave_interrupted(database_url)
        assert execute(database_url, FINISH) == []
        with psycopg.connect(database_url, autocommit=True) as dba:
            maintain(dba, report=print)
        assert steps(database_url, "finalize") == ["finalize"]
        # The older transaction therefore needn't wait.
        older.execute("SET LOCAL lock_timeout = '1s'")
        assert older.execute(COUNT).fetchall() == [(0,)]

    assert [o for _, o in execute(database_url, FINISH)] == ["finalized", "dropped"]
