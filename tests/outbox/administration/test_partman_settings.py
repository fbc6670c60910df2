"""Manual changes to pg_partman's configuration of our tables are reverted."""

from typing import Final

import pytest

from tests.fixtures.doctor import Doctor
from tests.fixtures.sessions import execute
from tests.fixtures.upkeep import run_upkeep

CONFIGURATION: Final = (
    "SELECT to_jsonb(c) FROM partman.part_config c WHERE parent_table = '{}'"
)
CHANGES: Final = (
    "retention = '1 day', retention_schema = 'archive', retention_keep_table = false,"
    " retention_keep_index = false, automatic_maintenance = 'on', premake = 30,"
    " infinite_time_partitions = false, partition_interval = '2 days',"
    " template_table = 'outbox.dead_letter_template', control = 'available_at',"
    " datetime_string = 'YYYY', epoch = 'seconds', constraint_cols = ARRAY['topic'],"
    " inherit_privileges = true, ignore_default_data = false,"
    " undo_in_progress = true, jobmon = true"
)


@pytest.mark.parametrize("table", ["outbox.message", "outbox.position"])
@pytest.mark.parametrize(
    "change",
    [f"UPDATE partman.part_config SET {CHANGES}", "DELETE FROM partman.part_config"],
)
def test_the_upkeep_restores_settings_that_were_changed_or_deleted(
    change: str, table: str, database_url: str, doctor: Doctor
) -> None:
    run_upkeep(database_url)
    before = execute(database_url, CONFIGURATION.format(table))
    execute(database_url, f"{change} WHERE parent_table = '{table}'")
    assert execute(database_url, CONFIGURATION.format(table)) != before

    run_upkeep(database_url)

    assert execute(database_url, CONFIGURATION.format(table)) == before
    assert doctor(database_url) == (0, [])
