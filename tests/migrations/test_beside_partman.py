"""Other uses of pg_partman and its settings leave pillarbox's tables alone."""

from collections.abc import Sequence
from typing import Final

import psycopg
import pytest

from pillarbox.outbox.cli.main import main
from tests.fixtures.doctor import Doctor
from tests.fixtures.sessions import execute
from tests.fixtures.upkeep import run_upkeep

ALL: Final = """
SELECT p.parent_table, x.partition::text, x.starts_at, x.ends_at, x.owner
  FROM outbox.partition_policy p, outbox.partitions(p.parent_table) x ORDER BY 1, 3
"""
LATER: Final = """
SELECT partition::text FROM outbox.partitions('outbox.message')
 WHERE starts_at > now() + %s * interval '24 hours' ORDER BY 1
"""
THEIRS: Final = "SELECT count(*) FROM outbox.partitions('public.sale')"
CONFIGURATION: Final = (
    "SELECT to_jsonb(c) FROM partman.part_config c ORDER BY parent_table"
)
OURS: Final = ["outbox.message", "outbox.position"]
CHANGES: Final = (
    "retention = '1 day', retention_schema = 'archive', retention_keep_table = false,"
    " retention_keep_index = false, automatic_maintenance = 'on', premake = 30,"
    " infinite_time_partitions = false, partition_interval = '2 days',"
    " template_table = 'outbox.dead_letter_template', control = 'available_at',"
    " datetime_string = 'YYYY', epoch = 'seconds', constraint_cols = ARRAY['topic'],"
    " inherit_privileges = true, ignore_default_data = false,"
    " undo_in_progress = true, jobmon = true"
)
# A table of another user of pg_partman, with a missing day ahead.
SALE: Final = """
CREATE TABLE public.sale (at timestamptz NOT NULL) PARTITION BY RANGE (at);
SELECT partman.create_parent(p_parent_table := 'public.sale', p_control := 'at',
    p_interval := '1 day', p_type := '{}', p_premake := 3);
UPDATE partman.part_config SET premake = 5, infinite_time_partitions = true
 WHERE parent_table = 'public.sale'
"""


def drop_later(url: str, days: int) -> Sequence[str]:
    later = [str(name) for (name,) in execute(url, LATER % days)]
    for partition in later:
        execute(url, f"DROP TABLE {partition}")
    return later


@pytest.mark.week
def test_a_pg_partman_run_by_others_makes_no_partitions_of_pillarbox(
    database_url: str, doctor: Doctor
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

    # As a superuser in another time zone does.
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("SET timezone = 'Pacific/Auckland'")
        connection.execute("SELECT partman.run_maintenance()")

    assert execute(database_url, ALL) == ours
    assert execute(database_url, THEIRS) > before
    assert main(["maintain", "--database", database_url]) == 0
    assert [str(name) for (name,) in execute(database_url, LATER % 3)] == missing
    assert doctor(database_url)[1] == []


@pytest.mark.week
def test_a_table_with_the_name_of_a_partition_is_reported_and_can_be_renamed(
    database_url: str, doctor: Doctor
) -> None:
    taken, *_ = drop_later(database_url, 5)
    execute(database_url, f"CREATE TABLE {taken} AS SELECT 'mine' AS whose")
    assert main(["maintain", "--database", database_url]) == 2
    (found,) = (f for f in doctor(database_url)[1] if f["check"] == "upkeep")
    assert f"{taken}" in found["finding"] + found["remedy"]

    _, _, name = taken.partition(".")
    execute(database_url, f"ALTER TABLE {taken} RENAME TO {name}_aside")

    assert main(["maintain", "--database", database_url]) == 0
    assert doctor(database_url)[1] == []
    assert execute(database_url, f"SELECT whose FROM {taken}_aside") == [("mine",)]


def test_the_upkeep_restores_settings_that_were_changed_or_deleted(
    database_url: str, doctor: Doctor
) -> None:
    run_upkeep(database_url)
    before = execute(database_url, CONFIGURATION)
    for change in (
        f"UPDATE partman.part_config SET {CHANGES}",
        "DELETE FROM partman.part_config",
    ):
        execute(
            database_url,
            f"{change} WHERE parent_table = ANY (%s)",
            [["outbox.message", "outbox.position"]],
        )
        assert execute(database_url, CONFIGURATION) != before

        run_upkeep(database_url)

        assert execute(database_url, CONFIGURATION) == before
        assert doctor(database_url) == (0, [])
