"""The server crashes while a detach waits, and the next run continues."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

from pillarbox.outbox.cli.main import main
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.processes import RunningProcess, command_line
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.outbox.administration.retiring import (
    EXPIRED,
    NOTED,
    PENDING,
    acting_as,
    steps,
)
from tests.outbox.administration.test_upkeep import add_old, old_partition

pytestmark = pytest.mark.fault

ADD = "SET statement_timeout = '5s'; SELECT outbox.add('t', '{}'::jsonb)"
DETACHES = (
    "SELECT schedule, command FROM cron.job WHERE jobname LIKE 'pillarbox detach %'"
)


@pytest.fixture
def url(scheduled_server: PostgresServer) -> str:
    """Return a database with two expired partitions, one with a settled row."""
    old_partition(scheduled_server.url, 20)
    old_partition(scheduled_server.url, 25)
    add_old(scheduled_server.url, 25, outcome="published")
    return scheduled_server.url


@contextmanager
def crash_after(server: PostgresServer) -> Iterator[None]:
    """Let a detach in the block wait for a reader, and then crash the server."""
    with closing(psycopg.connect(server.url)) as reading:
        reading.execute("SELECT count(*) FROM outbox.message")
        yield
        server.restart("immediate")


def interrupt_the_command(server: PostgresServer, log: Path) -> None:
    with crash_after(server):
        line = command_line("pillarbox", "maintain", "--database", server.url)
        command = RunningProcess(line, log, {})
        wait_for("detach", lambda: execute(server.url, PENDING))
    assert command.wait() == 2
    assert "pillarbox: can't reach the database" in command.log()
    assert "Traceback" not in command.log()


def test_the_next_command_finalizes_a_detach_that_a_crash_interrupted_and_continues(
    url: str, scheduled_server: PostgresServer, tmp_path: Path
) -> None:
    interrupt_the_command(scheduled_server, tmp_path / "maintain.log")

    execute(url, ADD)
    assert execute(url, PENDING) == []
    assert steps(url, "finalize", "detach", "drop") == ["finalize", "detach"]
    assert main(["maintain", "--database", url]) == 0

    assert execute(url, EXPIRED) == []
    assert execute(url, NOTED) == []
    assert steps(url, "make", "hold", "attach", "drop") == []


def test_after_a_crash_the_job_is_removed_and_its_detach_finalized(
    url: str, scheduled_server: PostgresServer
) -> None:
    with acting_as(url, "pillarbox_detacher") as detacher:
        detacher.execute("SELECT outbox.schedule_detaches()")
        (_, statement), *_ = execute(url, DETACHES + " ORDER BY jobid")

        def detach() -> None:
            with (
                suppress(psycopg.OperationalError),
                acting_as(url, "pillarbox_detacher") as job,
            ):
                job.execute(statement)

        with crash_after(scheduled_server):
            job = threading.Thread(target=detach)
            job.start()
            wait_for("detach", lambda: execute(url, PENDING))
            detacher.execute("SELECT outbox.schedule_detaches()")
            # It is scheduled for 30 February, so nothing restarts it after the crash.
            assert execute(url, DETACHES) == [("0 0 30 2 *", statement)]
        job.join(60)

    execute(url, ADD)
    with acting_as(url, "pillarbox_detacher") as detacher:
        detacher.execute("SELECT outbox.schedule_detaches()")

    assert statement not in [command for _, command in execute(url, DETACHES)]
    assert len(execute(url, EXPIRED)) == 1
    assert steps(url, "finalize", "detach", "drop") == ["detach"]
