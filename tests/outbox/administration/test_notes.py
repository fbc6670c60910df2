"""A partition that was to be dropped but must stay is found when it is detached."""

from datetime import timedelta

import psycopg
import pytest

from outbox.administration.upkeep import maintain
from outbox.cli.main import main
from tests.fixtures.doctor import Doctor
from tests.fixtures.positions import REPLAY
from tests.fixtures.sessions import execute
from tests.outbox.administration.retiring import (
    AT_THE_NOTES,
    EXPIRED,
    NOTE_A_JOB,
    NOTED,
    acting_as,
    reader,
    steps,
)
from tests.outbox.administration.test_detach import leave_detached
from tests.outbox.administration.test_upkeep import add_old, old_partition

PLAN = (
    "SELECT outbox.finish_detached(parent_table) FROM outbox.partition_policy"
    " ORDER BY parent_table"
)
UPKEEP = "CALL outbox.maintain()"
KEEP = "UPDATE outbox.partition_policy SET retention = '60 days'"
ROWS = "SELECT count(*) FROM outbox.message"


@pytest.fixture
def planned(database_url: str) -> str:
    """Return an expired partition with a settled row, which a job is to detach."""
    old_partition(database_url)
    add_old(database_url, outcome="published")
    execute(database_url, NOTE_A_JOB)
    assert execute(database_url, NOTED) == execute(database_url, EXPIRED)
    ((name,),) = execute(database_url, EXPIRED)
    return str(name)


def plan(url: str) -> None:
    with acting_as(url, "pillarbox_detacher") as detacher:
        detacher.execute(PLAN)


def upkeep(url: str) -> None:
    with acting_as(url, "pillarbox_maintainer") as maintainer:
        maintainer.execute(UPKEEP)


def detach_by_job(url: str, partition: str) -> None:
    with acting_as(url, "pillarbox_detacher") as job:
        detach = f"ALTER TABLE outbox.message DETACH PARTITION {partition} CONCURRENTLY"
        job.execute(detach.encode())


@pytest.mark.parametrize("change", [REPLAY, KEEP])
def test_a_detached_partition_that_must_stay_is_attached_again(
    change: str, database_url: str, planned: str
) -> None:
    execute(database_url, change)
    upkeep(database_url)

    detach_by_job(database_url, planned)
    assert execute(database_url, ROWS) == [(0,)]
    assert steps(database_url, "attach", "drop") == ["attach"]
    upkeep(database_url)

    assert execute(database_url, ROWS) == [(1,)]
    assert execute(database_url, EXPIRED) == [(planned,)]
    # Jobs stay scheduled until a plan removes them.
    detach_by_job(database_url, planned)
    plan(database_url)
    assert execute(database_url, ROWS) == [(1,)]


def test_a_retention_raised_after_the_detach_is_respected(
    database_url: str, planned: str, doctor: Doctor
) -> None:
    detach_by_job(database_url, planned)
    execute(database_url, KEEP)
    (found,) = doctor(database_url)[1]
    assert "is detached, so that queries don't see its rows" in found["finding"]
    assert f"ATTACH PARTITION {planned}" in found["remedy"]

    upkeep(database_url)

    assert execute(database_url, ROWS) == [(1,)]
    assert doctor(database_url)[1] == []


def test_a_retention_raised_while_a_detach_waits_is_respected(
    database_url: str,
) -> None:
    old_partition(database_url)
    add_old(database_url, outcome="published")
    with (
        psycopg.connect(database_url, autocommit=True) as dba,
        reader(database_url),
    ):
        maintain(dba, report=print, detach_wait=timedelta(milliseconds=500))
    assert steps(database_url, "finalize") == ["finalize"]
    execute(database_url, KEEP)

    upkeep(database_url)

    assert execute(database_url, ROWS) == [(1,)]
    assert steps(database_url, "finalize", "attach", "drop") == []


def test_a_manual_detach_of_an_unexpired_partition_is_left_alone(
    database_url: str, doctor: Doctor
) -> None:
    young = (
        "SELECT partition::text FROM outbox.partitions('outbox.message')"
        " WHERE ends_at < now() ORDER BY ends_at DESC LIMIT 1"
    )
    ((name,),) = execute(database_url, young)
    detach = f"ALTER TABLE outbox.message DETACH PARTITION {name} CONCURRENTLY"
    with reader(database_url), psycopg.connect(database_url, autocommit=True) as dba:
        dba.execute("SET statement_timeout = '50ms'")
        with pytest.raises(psycopg.errors.QueryCanceled):
            dba.execute(detach.encode())

    upkeep(database_url)

    assert steps(database_url, "finalize", "attach", "drop") == []
    assert execute(database_url, NOTED) == []
    assert any("half detached" in f["finding"] for f in doctor(database_url)[1])


def test_a_note_is_removed_with_its_table(database_url: str, planned: str) -> None:
    execute(database_url, REPLAY)
    upkeep(database_url)
    assert execute(database_url, NOTED) == [(planned,)]
    execute(database_url, f"DROP TABLE {planned}")

    upkeep(database_url)

    assert execute(database_url, NOTED) == []


def test_the_command_notes_a_detach_that_it_leaves_for_another_upkeep_to_drop(
    database_url: str,
) -> None:
    old_partition(database_url)
    with psycopg.connect(database_url) as other:
        other.execute(AT_THE_NOTES)
        assert main(["maintain", "--database", database_url]) == 0

    assert execute(database_url, EXPIRED) == []
    assert len(execute(database_url, NOTED)) == 1
    assert steps(database_url, "drop") == ["drop"]


def test_the_timeline_shows_a_detached_partition(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_detached(database_url)
    execute(database_url, KEEP)

    assert main(["partitions", "--database", database_url]) == 0

    assert "  detached " in capsys.readouterr().out
