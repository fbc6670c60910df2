"""Tables that are named like partitions, but are neither attached nor recorded."""

import pytest

from tests.fixtures.doctor import Doctor
from tests.fixtures.marks import replay
from tests.fixtures.sessions import execute
from tests.outbox.administration.retiring import EXPIRED
from tests.outbox.administration.test_detach import leave_detached
from tests.outbox.administration.test_upkeep import FOLLOWERS, add_old, old_partition

OLDEST = (
    "SELECT min(starts_at) < now() - 10 * interval '24 hours'"
    " FROM outbox.partitions(%s)"
)


def test_a_detached_partition_without_a_record_is_reported_and_left_alone(
    database_url: str, doctor: Doctor
) -> None:
    name = leave_detached(database_url)
    replay(database_url, table=name)
    execute(database_url, "DELETE FROM outbox.retiring_partition")

    execute(database_url, "CALL outbox.maintain()")

    (found,) = doctor(database_url)[1]
    assert (found["check"], found["severity"]) == ("partitions", "error")
    assert f"{name} has the name of a partition of outbox.message" in found["finding"]
    assert "attach it to outbox.message" in found["remedy"]
    assert execute(database_url, f"SELECT count(*) FROM {name}") == [(1,)]


@pytest.mark.parametrize("name", ["outbox.message_p20269999", "inbox.ack_p2026_01_01"])
def test_any_table_with_the_name_of_a_partition_is_reported(
    name: str, database_url: str, doctor: Doctor
) -> None:
    execute(database_url, f"CREATE TABLE {name} (id uuid)")

    (found,) = doctor(database_url)[1]

    assert found["finding"].startswith(f"{name} has the name of a partition of")


@pytest.mark.parametrize(
    "name",
    [
        "outbox.message_p20260101_backup",
        "outbox.message_parts_20260101",
        "public.message_p20260101",
    ],
)
def test_other_names_are_not_reported(
    name: str, database_url: str, doctor: Doctor
) -> None:
    execute(database_url, f"CREATE TABLE {name} (LIKE outbox.message)")

    assert doctor(database_url)[1] == []


@pytest.mark.parametrize(
    ("begin", "is_needed"),
    [(-1, True), (0, True), (3, False), (-6, True), (-20, False), (20, False)],
)
def test_marks_stay_while_a_table_named_like_a_day_or_week_may_hold_their_messages(
    begin: int, is_needed: bool, database_url: str
) -> None:
    old_partition(database_url)
    add_old(database_url, outcome="published")
    ((partition,),) = execute(database_url, EXPIRED)
    ((name,),) = execute(
        database_url,
        "SELECT 'outbox.message_p' || to_char((starts_at + %s * interval '24 hours')"
        " AT TIME ZONE 'UTC', 'YYYYMMDD') FROM outbox.partitions('outbox.message')"
        " WHERE partition = to_regclass(%s)",
        (begin, partition),
    )
    execute(database_url, f"ALTER TABLE outbox.message DETACH PARTITION {partition}")
    if name != partition:
        execute(
            database_url,
            f"ALTER TABLE {partition} RENAME TO {name.removeprefix('outbox.')}",
        )

    execute(database_url, "CALL outbox.maintain()")

    kept = [execute(database_url, OLDEST, [table]) == [(True,)] for table in FOLLOWERS]
    assert kept == [is_needed] * len(FOLLOWERS)


@pytest.mark.parametrize("bound", ["DEFAULT", "FOR VALUES FROM (MINVALUE) TO ('{}')"])
def test_marks_stay_while_their_messages_may_lie_in_a_partition_without_a_begin(
    bound: str, database_url: str
) -> None:
    old_partition(database_url)
    add_old(database_url, outcome="published")
    ((partition, end),) = execute(
        database_url,
        "SELECT partition::text, ends_at::text FROM outbox.partitions('outbox.message')"
        f" WHERE partition = to_regclass(({EXPIRED}))",
    )
    execute(
        database_url,
        f"ALTER TABLE outbox.message DETACH PARTITION {partition};"
        f" ALTER TABLE {partition} RENAME TO message_past;"
        " ALTER TABLE outbox.message ATTACH PARTITION outbox.message_past "
        + bound.format(end),
    )

    execute(database_url, "CALL outbox.maintain()")

    assert all(execute(database_url, OLDEST, [t]) == [(True,)] for t in FOLLOWERS)
