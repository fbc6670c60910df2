"""Other uses of pg_partman in the database leave pillarbox's tables alone."""

import re
from collections.abc import Sequence
from datetime import UTC, timedelta
from itertools import pairwise
from typing import Final

import psycopg
import pytest

from outbox.cli.main import main
from tests.fixtures.doctor import Doctor
from tests.fixtures.pasting import paste
from tests.fixtures.sessions import execute
from tests.outbox.administration.retiring import EXPIRED
from tests.outbox.administration.test_upkeep import add_old, old_partition

ALL: Final = """
SELECT p.parent_table, x.partition::text, x.starts_at, x.ends_at, x.owner
  FROM outbox.partition_policy p, outbox.partitions(p.parent_table) x ORDER BY 1, 3
"""
LATER: Final = """
SELECT partition::text FROM outbox.partitions('outbox.message')
 WHERE starts_at > now() + %s * interval '24 hours' ORDER BY 1
"""
OURS: Final = """
SELECT DISTINCT owner::regrole::text, ends_at - starts_at = interval '1 day',
       starts_at = date_trunc('day', starts_at, 'UTC'),
       right(partition::text, 2) = to_char(starts_at AT TIME ZONE 'UTC', 'DD')
  FROM outbox.partitions('outbox.message')
"""
# Every partition has the right owner, and they leave no gap.
COMPLETE: Final = """
SELECT array_agg(DISTINCT owner::regrole::text),
       sum(ends_at - starts_at) = max(ends_at) - min(starts_at)
  FROM outbox.partitions('outbox.message')
"""
GAP: Final = re.compile(r"outbox\.message has no partition from (.+) to (.+): rows of")
MESSAGE: Final = " WHERE parent_table = 'outbox.message'"
THEIRS: Final = "SELECT count(*) FROM outbox.partitions('public.sale')"
# A table of another user of pg_partman, with a missing day ahead.
SALE: Final = """
CREATE TABLE public.sale (at timestamptz NOT NULL) PARTITION BY RANGE (at);
SELECT partman.create_parent(p_parent_table := 'public.sale', p_control := 'at',
    p_interval := '1 day', p_type := '{}', p_premake := 3);
UPDATE partman.part_config SET premake = 5, infinite_time_partitions = true
 WHERE parent_table = 'public.sale'
"""


def run_maintenance(url: str, zone: str) -> None:
    """Run pg_partman's own maintenance, as a superuser in another time zone does."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SELECT set_config('timezone', %s, false)", (zone,))
        connection.execute("SELECT partman.run_maintenance()")


def drop_later(url: str, days: int) -> Sequence[str]:
    later = [str(name) for (name,) in execute(url, LATER % days)]
    for partition in later:
        execute(url, f"DROP TABLE {partition}")
    return later


def replace_foreign(url: str, doctor: Doctor) -> None:
    """Do what the doctor advises about partitions of messages that are not ours."""
    for found in doctor(url)[1]:
        if "OWNER TO" in found["remedy"]:
            paste(url, found["remedy"])
    names = [
        f["finding"].partition(" of ")[0].removeprefix("outbox.")
        for f in doctor(url)[1]
        if "detach and rename it" in f["remedy"]
    ]
    with psycopg.connect(url) as connection:
        for name in names:
            connection.execute(
                f"ALTER TABLE outbox.message DETACH PARTITION outbox.{name};"
                f" ALTER TABLE outbox.{name} RENAME TO {name}_aside".encode()
            )
        connection.execute("SELECT outbox.make_partitions('outbox.message')")
        for name in names:
            connection.execute(
                "SELECT outbox.make_partitions_at('outbox.message',"
                f" array_agg(created_at)) FROM outbox.{name}_aside;"
                f" INSERT INTO outbox.message SELECT * FROM outbox.{name}_aside;"
                f" DROP TABLE outbox.{name}_aside".encode()
            )
    for found in doctor(url)[1]:
        if gap := GAP.match(found["finding"]):
            bounds = "FOR VALUES FROM ('{}') TO ('{}')".format(*gap.groups())
            execute(
                url,
                "SET ROLE pillarbox_owner; CREATE TABLE outbox.message_rest"
                f" PARTITION OF outbox.message {bounds}",
            )
        else:
            paste(url, found["remedy"])


def choose_automatic(url: str) -> None:
    execute(url, "UPDATE outbox.partition_policy SET automatic = true")
    assert main(["maintain", "--database", url]) == 0


@pytest.mark.week
@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Pacific/Auckland"])
def test_a_pg_partman_run_by_others_makes_no_partitions_of_pillarbox(
    zone: str, database_url: str, doctor: Doctor
) -> None:
    ((major,),) = execute(
        database_url,
        "SELECT split_part(extversion, '.', 1)::int FROM pg_extension"
        " WHERE extname = 'pg_partman'",
    )
    execute(database_url, SALE.format("native" if major < 5 else "range"))
    before = execute(database_url, THEIRS)
    missing = drop_later(database_url, 3)
    ours = execute(database_url, ALL)

    run_maintenance(database_url, zone)

    assert execute(database_url, ALL) == ours
    assert execute(database_url, THEIRS) > before
    assert main(["maintain", "--database", database_url]) == 0
    assert [str(name) for (name,) in execute(database_url, LATER % 3)] == missing
    assert doctor(database_url)[1] == []


def test_the_policy_can_allow_pg_partmans_worker_and_the_doctor_finds_differences(
    database_url: str, doctor: Doctor
) -> None:
    automatic = "SELECT DISTINCT automatic_maintenance FROM partman.part_config"
    assert execute(database_url, automatic) == [("off",)]

    choose_automatic(database_url)

    assert execute(database_url, automatic) == [("on",)]
    assert doctor(database_url)[1] == []
    execute(database_url, "UPDATE outbox.partition_policy SET automatic = false")
    status, findings = doctor(database_url)
    assert (status, {f["severity"] for f in findings}) == (1, {"warning"})
    # The next upkeep applies the policy.
    assert main(["maintain", "--database", database_url]) == 0
    assert execute(database_url, automatic) == [("off",)]
    assert doctor(database_url)[1] == []


@pytest.mark.week
@pytest.mark.parametrize("days", [3, 5])
@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Pacific/Auckland"])
def test_the_doctors_remedy_replaces_partitions_made_by_others(
    zone: str, days: int, database_url: str, doctor: Doctor
) -> None:
    choose_automatic(database_url)
    drop_later(database_url, days)
    run_maintenance(database_url, zone)
    execute(database_url, "UPDATE outbox.partition_policy SET automatic = false")
    in_a_day = (
        "INSERT INTO outbox.message (id, created_at, lane, topic, content_type,"
        " payload) SELECT outbox.uuid7(), max(ends_at) - interval '1 minute', 0, 't',"
        " 'c', '' FROM outbox.partitions('outbox.message')"
    )
    execute(database_url, in_a_day)
    findings = doctor(database_url)[1]
    assert any("postgres" in f["finding"] for f in findings)

    replace_foreign(database_url, doctor)

    assert doctor(database_url)[1] == []
    assert execute(database_url, OURS) == [("pillarbox_owner", True, True, True)]
    assert execute(database_url, "SELECT count(*) FROM outbox.message") == [(1,)]
    assert main(["maintain", "--database", database_url]) == 0


def test_a_partition_of_another_owner_is_not_held_forever(
    database_url: str, doctor: Doctor
) -> None:
    old_partition(database_url)
    add_old(database_url, outcome="published")
    ((name,),) = execute(database_url, EXPIRED)
    execute(database_url, f"ALTER TABLE {name} OWNER TO postgres")
    (held,) = (f for f in doctor(database_url)[1] if "and held" in f["finding"])
    assert "but what finds its unsettled rows failed" in held["finding"]

    paste(database_url, held["remedy"])

    assert main(["maintain", "--database", database_url]) == 0
    assert execute(database_url, EXPIRED) == []
    assert doctor(database_url)[1] == []


@pytest.mark.week
def test_a_table_with_the_name_of_a_partition_is_reported_and_can_be_renamed(
    database_url: str, doctor: Doctor
) -> None:
    taken, *_ = drop_later(database_url, 5)
    execute(database_url, f"CREATE TABLE {taken} AS SELECT 'mine' AS whose")
    assert main(["maintain", "--database", database_url]) == 2
    (found,) = (f for f in doctor(database_url)[1] if "not attached" in f["finding"])
    assert found["finding"].startswith(f"{taken} has the name of a partition of")
    assert "otherwise rename" in found["remedy"]

    _, _, name = taken.partition(".")
    execute(database_url, f"ALTER TABLE {taken} RENAME TO {name}_aside")

    assert main(["maintain", "--database", database_url]) == 0
    assert doctor(database_url)[1] == []
    assert execute(database_url, f"SELECT whose FROM {taken}_aside") == [("mine",)]


@pytest.mark.parametrize("hours", [23, 25])
def test_days_of_23_or_25_hours_made_by_others_are_replaced_without_a_gap(
    hours: int, database_url: str, doctor: Doctor
) -> None:
    # So that the doctor looks at all of them.
    execute(database_url, "UPDATE outbox.partition_policy SET premake = 9" + MESSAGE)
    ((end,),) = execute(
        database_url, "SELECT max(ends_at) FROM outbox.partitions('outbox.message')"
    )
    first = end.astimezone(UTC)
    starts = [first] + [first + timedelta(days=n, hours=hours) for n in range(5)]
    for number, (start, end) in enumerate(pairwise(starts)):
        name = f"outbox.message_p{first + timedelta(days=number):%Y_%m_%d}"
        execute(
            database_url,
            f"CREATE TABLE {name} PARTITION OF outbox.message"
            f" FOR VALUES FROM ('{start}') TO ('{end}')",
        )

    replace_foreign(database_url, doctor)

    assert doctor(database_url)[1] == []
    assert execute(database_url, COMPLETE) == [(["pillarbox_owner"], True)]
