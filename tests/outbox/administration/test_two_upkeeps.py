"""Concurrent upkeeps: one yields to the other, and neither fails."""

import threading

import psycopg
import pytest

from pillarbox.outbox.cli.main import main
from pillarbox.outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.outbox.administration.retiring import (
    AT_THE_NOTES,
    EXPIRED,
    acting_as,
    steps,
)
from tests.outbox.administration.test_upkeep import (
    drop_ahead,
    exists,
    old_partition,
)

FINISH = "SELECT * FROM outbox.finish_detached('outbox.message')"
SUCCEEDED = "SELECT succeeded_at IS NOT NULL FROM outbox.upkeep"
AT_THE_PREMAKE = """
    SELECT pg_advisory_xact_lock(
        hashtextextended('outbox.make_partitions outbox.message', 0)
    )
"""
TOLD = {
    "notes": "another upkeep is handling the detached partitions of outbox.message",
    "premake": "upkeep: premake of outbox.message",
    "command": "another pillarbox maintain is running",
}
"""What an upkeep says that waits for this lock or leaves work to its holder."""
WAITS = "SELECT 1 FROM pg_locks WHERE NOT granted"


@pytest.mark.parametrize("lock", TOLD)
def test_an_upkeep_that_lacks_a_lock_says_so_and_the_next_one_does_everything(
    lock: str, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if lock != "premake":  # each part of a run would wait for it
        old_partition(database_url)
    ahead = drop_ahead(database_url)
    with psycopg.connect(database_url) as holder:
        if lock == "command":
            holder.execute("SELECT pg_advisory_lock(%s, %s)", [LOCK_CLASS, Lock.UPKEEP])
        else:
            holder.execute(AT_THE_NOTES if lock == "notes" else AT_THE_PREMAKE)

        ended = main(["maintain", "--database", database_url])

        assert ended == (0 if lock == "notes" else 2)
        told = capsys.readouterr().err
        assert TOLD[lock] in told
        assert "pillarbox doctor" in told
        assert execute(database_url, SUCCEEDED) == [(False,)]
        if lock == "notes":
            # It has detached the partition, and leaves its drop to the other.
            assert execute(database_url, EXPIRED) == []
            assert steps(database_url, "drop") == ["drop"]

    assert main(["maintain", "--database", database_url]) == 0
    assert execute(database_url, EXPIRED) == []
    assert steps(database_url, "drop") == []
    assert exists(database_url, ahead)
    assert execute(database_url, SUCCEEDED) == [(True,)]


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
