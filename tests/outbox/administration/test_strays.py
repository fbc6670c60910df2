"""Tables that were partitions and have no note are found and attached again."""

import pytest

from tests.fixtures.doctor import Doctor
from tests.fixtures.marks import count_holding, replay
from tests.fixtures.pasting import paste
from tests.fixtures.sessions import execute
from tests.outbox.administration.test_detach import leave_detached


def test_a_partition_without_a_note_is_attached(
    database_url: str, doctor: Doctor
) -> None:
    name = leave_detached(database_url)
    replay(database_url, table=name)
    execute(database_url, "DELETE FROM outbox.retiring_partition")
    execute(database_url, "CALL outbox.maintain()")
    (found,) = doctor(database_url)[1]
    assert (found["check"], found["severity"]) == ("partitions", "error")
    assert f"{name} was detached from outbox.message" in found["finding"]

    paste(database_url, found["remedy"])

    execute(database_url, "CALL outbox.maintain()")
    (found,) = (f for f in doctor(database_url)[1] if f["check"] == "retention")
    assert found["finding"].startswith(f"{name} is past its retention and held:")
    assert count_holding(database_url) == 1


@pytest.mark.parametrize("concurrently", ["", " CONCURRENTLY"])
@pytest.mark.parametrize("interval", ["hourly", "daily", "weekly"])
def test_a_manually_detached_partition_gets_its_bounds_back(
    interval: str, concurrently: str, database_url: str, doctor: Doctor
) -> None:
    paste(
        database_url,
        f"pillarbox retention set inbox.receipt 60d --interval {interval}",
    )
    last = (
        "SELECT partition::text, starts_at, ends_at"
        " FROM outbox.partitions('inbox.receipt') ORDER BY starts_at DESC LIMIT 2"
    )
    before = execute(database_url, last)
    for partition, _, _ in before:
        detach = f"ALTER TABLE inbox.receipt DETACH PARTITION {partition}"
        execute(database_url, detach + concurrently)
    strays = [f for f in doctor(database_url)[1] if "no upkeep" in f["finding"]]
    assert len(strays) == 2

    for found in strays:
        paste(database_url, found["remedy"])

    assert execute(database_url, last) == before
    assert doctor(database_url)[1] == []


def test_an_old_weekly_partition_is_attached_although_the_policy_is_daily(
    database_url: str, doctor: Doctor
) -> None:
    execute(
        database_url,
        "SET ROLE pillarbox_owner; CREATE TABLE outbox.message_p20200106"
        " (LIKE outbox.message INCLUDING ALL); INSERT INTO outbox.message_p20200106"
        " (id, created_at, lane, topic, content_type, payload)"
        " VALUES (outbox.uuid7(), '2020-01-12 23:59+00', 0, 't', 'c', '')",
    )
    (found,) = doctor(database_url)[1]

    paste(database_url, found["remedy"])

    assert execute(database_url, "SELECT count(*) FROM outbox.message") == [(1,)]


def test_foreign_tables_are_not_treated_as_partitions(
    database_url: str, doctor: Doctor
) -> None:
    for name, columns in {
        "outbox.message_p20269999": "(LIKE outbox.message)",
        "outbox.message_p20260101_backup": "(LIKE outbox.message)",
        "outbox.message_parts_20260101": "(LIKE outbox.message)",
        "outbox.message_p20260101": "(id uuid, topic text)",
        "public.message_p20260101": "(LIKE outbox.message)",
    }.items():
        execute(database_url, f"CREATE TABLE {name} {columns}")

    assert doctor(database_url)[1] == []
