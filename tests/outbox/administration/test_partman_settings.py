"""Manual changes to pg_partman's configuration of our tables are reverted."""

from typing import Final

import psycopg
import pytest

from outbox.cli.main import main
from tests.fixtures.doctor import Doctor
from tests.fixtures.sessions import execute

OF_MESSAGE: Final = " WHERE parent_table = 'outbox.message'"
UPDATE: Final = "UPDATE partman.part_config SET {} = {}" + OF_MESSAGE
CONFIGURATION: Final = "SELECT to_jsonb(c) FROM partman.part_config c" + OF_MESSAGE
CHANGES: Final = {
    "retention": "'1 day'",
    "retention_schema": "'archive'",
    "retention_keep_table": "false",
    "retention_keep_index": "false",
    "automatic_maintenance": "'on'",
    "premake": "30",
    "infinite_time_partitions": "false",
    "partition_interval": "'2 days'",
    "template_table": "'outbox.dead_letter_template'",
    "control": "'available_at'",
    "datetime_string": "'YYYY'",
    "epoch": "'seconds'",
    "constraint_cols": "ARRAY['topic']",
    "inherit_privileges": "true",
    "ignore_default_data": "false",
    "undo_in_progress": "true",
    "jobmon": "true",
}


@pytest.mark.parametrize("setting", CHANGES)
def test_manual_changes_are_reverted_and_reported_as_a_failure(
    setting: str, database_url: str, doctor: Doctor
) -> None:
    before = execute(database_url, CONFIGURATION)
    execute(database_url, UPDATE.format(setting, CHANGES[setting]))
    (changed,) = doctor(database_url)[1]
    assert setting.split("_")[0] in changed["finding"] + changed["remedy"]

    with pytest.raises(psycopg.Error, match=f"settings of pg_partman.*: {setting} was"):
        execute(database_url, "CALL outbox.maintain()")

    assert execute(database_url, CONFIGURATION) == before
    (reported,) = doctor(database_url)[1]
    assert reported["check"] == "upkeep"
    assert f"{setting} was" in reported["finding"]
    assert main(["maintain", "--database", database_url]) == 0
    assert doctor(database_url) == (0, [])


@pytest.mark.parametrize("table", ["outbox.message", "outbox.settlement"])
def test_deleted_settings_are_written_again_and_reported_as_a_failure(
    table: str, database_url: str, doctor: Doctor
) -> None:
    execute(database_url, "CALL outbox.maintain()")
    row = f" FROM partman.part_config c WHERE parent_table = '{table}'"
    before = execute(database_url, f"SELECT to_jsonb(c){row}")
    execute(database_url, f"DELETE{row}")

    deleted = f"settings of pg_partman for {table} were deleted"
    with pytest.raises(psycopg.Error, match=deleted):
        execute(database_url, "CALL outbox.maintain()")

    assert execute(database_url, f"SELECT to_jsonb(c){row}") == before
    (reported,) = doctor(database_url)[1]
    assert deleted in reported["finding"]
    assert main(["maintain", "--database", database_url]) == 0
    assert doctor(database_url) == (0, [])


def test_settings_that_a_restore_lost_are_written_again(database_url: str) -> None:
    execute(database_url, "CALL outbox.maintain()")
    execute(database_url, "UPDATE outbox.upkeep SET succeeded_in = 'elsewhere'")
    execute(database_url, "DELETE FROM partman.part_config")

    assert main(["maintain", "--database", database_url]) == 0


def test_a_change_for_a_follower_is_reported_as_a_failure(database_url: str) -> None:
    execute(
        database_url,
        "UPDATE partman.part_config SET premake = 30"
        " WHERE parent_table = 'outbox.settlement'",
    )

    with pytest.raises(psycopg.Error, match=r"outbox\.settlement.*: premake was 30"):
        execute(database_url, "CALL outbox.maintain()")


def test_a_change_by_the_policy_is_not_a_manual_change(database_url: str) -> None:
    execute(
        database_url,
        "UPDATE outbox.partition_policy SET premake = 9, automatic = true",
    )

    assert main(["maintain", "--database", database_url]) == 0

    settings = "SELECT premake, automatic_maintenance FROM partman.part_config"
    assert execute(database_url, settings + OF_MESSAGE) == [(9, "on")]


def test_an_equal_interval_in_another_notation_is_not_a_change(
    database_url: str,
) -> None:
    execute(database_url, UPDATE.format("partition_interval", "'24:00:00'"))
    execute(database_url, UPDATE.format("partition_interval", "'P1D'"))

    assert main(["maintain", "--database", database_url]) == 0


def test_make_partitions_reverts_settings_with_a_warning(
    database_url: str,
) -> None:
    execute(database_url, UPDATE.format("retention", "'1 day'"))
    heard: list[str] = []
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.add_notice_handler(
            lambda notice: heard.append(notice.message_primary or "")
        )
        connection.execute("SELECT outbox.make_partitions('outbox.message')")

    assert any("retention was 1 day and is null again" in line for line in heard)
