"""Concurrent upkeeps: one yields to the other, and neither fails."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from outbox.cli.main import main
from outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from outbox.testing.postgres import PostgresServer
from tests.fixtures.sessions import execute
from tests.fixtures.upkeep import run_upkeep
from tests.fixtures.waiting import wait_for
from tests.outbox.administration.retiring import (
    AT_THE_NOTES,
    EXPIRED,
    PENDING,
    acting_as,
    reader,
)
from tests.outbox.administration.test_upkeep import Upkeep, old_partition

FINISH = "SELECT * FROM outbox.finish_detached('outbox.message')"
RECORD = (
    "SELECT succeeded_at IS NOT NULL OR NULL,"
    " (SELECT string_agg(failure, '; ') FROM outbox.upkeep_failure)"
    " FROM outbox.upkeep"
)
NEWEST = """
    SELECT partition::text FROM outbox.partitions('outbox.message')
     ORDER BY starts_at DESC LIMIT 1
"""
AT_THE_PREMAKE = """
    SELECT pg_advisory_xact_lock(
        hashtextextended('outbox.make_partitions outbox.message', 0)
    )
"""
WAITS = "SELECT 1 FROM pg_locks WHERE NOT granted"


@contextmanager
def foreign_session(
    server: PostgresServer, url: str
) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """Open a transaction in a role that can connect and do nothing else."""
    role = f"foreign_{uuid4().hex}"
    execute(server.url, f"CREATE ROLE {role} LOGIN")
    try:
        with psycopg.connect(url, user=role) as connection:
            yield connection
            connection.rollback()
    finally:
        execute(server.url, f"DROP ROLE {role}")


def test_the_second_upkeep_leaves_the_detached_partitions_to_the_first_and_says_so(
    database_url: str,
) -> None:
    old_partition(database_url)
    with (
        psycopg.connect(database_url) as first,
        acting_as(database_url, "pillarbox_maintainer") as maintainer,
    ):
        upkeep = Upkeep(maintainer)
        first.execute(FINISH)

        maintainer.execute("CALL outbox.maintain()")

    assert upkeep.heard == [
        "another upkeep is handling the detached partitions of outbox.message",
        "the retention of outbox.message was left to another upkeep",
    ]
    # The first upkeep has to record the result.
    assert execute(database_url, RECORD) == [(None, None)]
    run_upkeep(database_url)
    assert execute(database_url, RECORD) == [(True, None)]


@pytest.mark.parametrize("lock", ["notes", "premake", "command"])
def test_a_foreign_session_with_a_lock_of_the_upkeep_is_named_by_the_doctor(
    lock: str,
    server: PostgresServer,
    database_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old_partition(database_url)
    ((newest,),) = execute(database_url, NEWEST)
    execute(database_url, f"DROP TABLE {newest}")
    with foreign_session(server, database_url) as holder:
        if lock == "command":
            holder.execute("SELECT pg_advisory_lock(%s, %s)", [LOCK_CLASS, Lock.UPKEEP])
        else:
            holder.execute(AT_THE_NOTES if lock == "notes" else AT_THE_PREMAKE)

        ended = main(["maintain", "--database", database_url])

        assert ended == (0 if lock == "notes" else 2)
        assert "pillarbox doctor" in capsys.readouterr().err
        ((succeeded, _),) = execute(database_url, RECORD)
        assert succeeded is None
        assert main(["doctor", "--database", database_url]) == 3
        told = capsys.readouterr().out
        assert str(holder.info.backend_pid) in told
        assert "holds 1 of our advisory locks" in told

    assert main(["maintain", "--database", database_url]) == 0
    assert execute(database_url, EXPIRED) == []
    assert execute(database_url, NEWEST) == [(newest,)]
    assert execute(database_url, RECORD) == [(True, None)]


def test_the_command_that_yields_does_not_fail(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old_partition(database_url)
    with psycopg.connect(database_url) as first:
        first.execute(AT_THE_NOTES)
        assert main(["maintain", "--database", database_url]) == 0

    told = capsys.readouterr().err
    assert (
        "another upkeep is handling the detached partitions of outbox.message" in told
    )
    assert "nothing is wrong, unless" in told


def test_the_commands_detach_is_recognized_despite_another_application_name(
    database_url: str,
) -> None:
    old_partition(database_url)
    separator = "&" if "?" in database_url else "?"
    url = f"{database_url}{separator}application_name=nightly"
    with reader(database_url) as reading:
        command = threading.Thread(target=main, args=(["maintain", "--database", url],))
        command.start()
        wait_for("detach", lambda: execute(database_url, PENDING))
        execute(database_url, "CALL outbox.maintain()")
        assert execute(database_url, PENDING) == [(1,)]
        reading.rollback()
        command.join(60)

    assert execute(database_url, EXPIRED) == []


@pytest.mark.week
def test_two_upkeeps_that_create_the_same_partitions_do_not_fail(
    database_url: str,
) -> None:
    ahead = (
        "SELECT partition::text FROM outbox.partitions('outbox.message')"
        " WHERE starts_at > now() + 3 * interval '24 hours'"
    )
    for (partition,) in execute(database_url, ahead):
        execute(database_url, f"DROP TABLE {partition}")
    with (
        psycopg.connect(database_url) as first,
        acting_as(database_url, "pillarbox_maintainer") as maintainer,
    ):
        first.execute("SELECT outbox.make_partitions('outbox.message')")
        second = threading.Thread(
            target=maintainer.execute, args=("CALL outbox.maintain()",)
        )
        second.start()
        wait_for("the second", lambda: execute(database_url, WAITS))
        first.commit()
        second.join(60)

    health = "SELECT ahead >= 7, gaps FROM outbox.partition_health"
    assert set(execute(database_url, health)) == {(True, 0)}
