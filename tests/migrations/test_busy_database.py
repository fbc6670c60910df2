"""An interrupted detach is finished although the database is always busy."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from outbox.administration.upkeep import maintain
from tests.fixtures.positions import publish
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.outbox.administration.retiring import EXPIRED, reader, steps
from tests.outbox.administration.test_upkeep import old_partition

FINISH = "SELECT partition, outcome FROM outbox.finish_detached('outbox.message')"
ADD = "SET statement_timeout = '5s'; SELECT outbox.add('t', '{}'::jsonb)"
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


@pytest.fixture
def interrupted(database_url: str) -> str:
    """An expired partition whose detach timed out waiting for a reader."""
    old_partition(database_url)
    with (
        psycopg.connect(database_url, autocommit=True) as dba,
        reader(database_url),
    ):
        maintain(dba, report=print, detach_wait=timedelta(milliseconds=500))
    assert steps(database_url, "finalize") == ["finalize"]
    ((name,),) = execute(database_url, EXPIRED)
    return str(name)


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
    database_url: str, interrupted: str
) -> None:
    with busy(database_url):
        done = execute(database_url, FINISH)

    assert done == [(interrupted, "finalized"), (interrupted, "dropped")]


def test_writers_and_readers_continue_while_the_routines_finish_a_detach(
    database_url: str, interrupted: str
) -> None:
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
    old_partition(database_url)
    with long_statement(database_url) as older:
        with (
            psycopg.connect(database_url, autocommit=True) as dba,
            reader(database_url),
        ):
            maintain(dba, report=print, detach_wait=timedelta(milliseconds=500))
        assert execute(database_url, FINISH) == []
        with psycopg.connect(database_url, autocommit=True) as dba:
            maintain(dba, report=print)
        assert steps(database_url, "finalize") == ["finalize"]
        # The older transaction therefore needn't wait.
        older.execute("SET LOCAL lock_timeout = '1s'")
        assert older.execute(COUNT).fetchall() == [(0,)]

    assert [o for _, o in execute(database_url, FINISH)] == ["finalized", "dropped"]
