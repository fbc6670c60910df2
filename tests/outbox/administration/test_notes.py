"""A partition that was to be dropped but must stay is found when it is detached."""

import pytest

from tests.fixtures.doctor import Doctor
from tests.fixtures.pasting import paste
from tests.fixtures.positions import REPLAY, publish
from tests.fixtures.sessions import execute
from tests.outbox.administration.retiring import (
    EXPIRED,
    NOTE_A_JOB,
    NOTED,
    acting_as,
    detach,
    interrupt_a_detach,
    steps,
)
from tests.outbox.administration.test_upkeep import add_old, exists, old_partition

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


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (REPLAY, "is past its retention and held and detached, so queries don't"),
        (KEEP, "is detached before the end of its retention"),
    ],
    ids=["replayed", "kept for longer"],
)
def test_a_detached_partition_that_must_stay_is_attached_again(
    change: str, finding: str, database_url: str, planned: str, doctor: Doctor
) -> None:
    execute(database_url, change)
    upkeep(database_url)

    detach(database_url, planned)
    assert execute(database_url, ROWS) == [(0,)]
    assert steps(database_url, "attach", "drop") == ["attach"]
    (found,) = (f for f in doctor(database_url)[1] if finding in f["finding"])
    assert f"ALTER TABLE outbox.message ATTACH PARTITION {planned}" in found["remedy"]
    upkeep(database_url)

    assert execute(database_url, ROWS) == [(1,)]
    assert execute(database_url, EXPIRED) == [(planned,)]
    # Jobs stay scheduled until a plan removes them.
    detach(database_url, planned)
    plan(database_url)
    assert execute(database_url, ROWS) == [(1,)]
    # The remedy does the same.
    detach(database_url, planned)
    paste(database_url, found["remedy"])
    assert execute(database_url, ROWS) == [(1,)]
    # Once nothing keeps it any longer, it is dropped as any other.
    publish(database_url)
    execute(database_url, KEEP.replace("60", "7"))
    execute(database_url, NOTE_A_JOB)
    detach(database_url, planned)
    upkeep(database_url)
    assert not exists(database_url, planned)


def test_a_retention_raised_while_a_detach_waits_is_respected(
    database_url: str, planned: str
) -> None:
    interrupt_a_detach(database_url, planned)
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
    interrupt_a_detach(database_url, name)

    upkeep(database_url)

    assert steps(database_url, "finalize", "attach", "drop") == []
    assert execute(database_url, NOTED) == []
    assert any(
        "detach was interrupted" in f["finding"] for f in doctor(database_url)[1]
    )


def test_a_note_is_removed_with_its_table(database_url: str, planned: str) -> None:
    execute(database_url, REPLAY)
    upkeep(database_url)
    assert execute(database_url, NOTED) == [(planned,)]
    execute(database_url, f"DROP TABLE {planned}")

    upkeep(database_url)

    assert execute(database_url, NOTED) == []
