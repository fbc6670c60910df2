"""Each thing is broken on purpose, and the doctor finds it and names the remedy."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from outbox.cli import main
from outbox.migrate import migrate
from outbox.testing.postgres import PostgresServer, postgres_server
from tests.fixtures.relay import execute
from tests.fixtures.waiting import wait_for
from tests.migrations.conftest import Doctor
from tests.migrations.test_upkeep import add_old, old_partition

Capture = pytest.CaptureFixture[str]


MESSAGE = "parent_table = 'outbox.message'"
IN_DAYS = (
    "(SELECT partition::text FROM outbox.partitions('outbox.message')"
    " WHERE starts_at = date_trunc('day', now(), 'UTC') + interval '{} days')"
)
BROKEN = {
    "pg_partman is older than we can use": (
        "UPDATE pg_extension SET extversion = '4.6.2' WHERE extname = 'pg_partman'",
        *("extensions", "error", "is older than 4.7", "ALTER EXTENSION"),
    ),
    "pg_partman was not upgraded with its files": (
        "UPDATE pg_extension SET extversion = '4.7.0' WHERE extname = 'pg_partman'",
        *("extensions", "warning", "its files on the server", "outbox migrate"),
    ),
    "the grants on pg_partman are lost": (
        "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA partman FROM pillarbox_owner, public",
        *("grants", "error", "may not use pg_partman", "GRANT EXECUTE ON ALL ROUTINES"),
    ),
    "today has no partition": (
        f"DO $$ BEGIN EXECUTE 'DROP TABLE ' || {IN_DAYS.format(0)}; END $$",
        *("partitions", "error", "rows are refused", "outbox.make_partitions"),
    ),
    "a day ahead is missing": (
        f"DO $$ BEGIN EXECUTE 'DROP TABLE ' || {IN_DAYS.format(3)}; END $$",
        *("partitions", "warning", "lacks 1 partitions", "outbox.make_partitions"),
    ),
    "there is a DEFAULT partition": (
        "SET ROLE pillarbox_owner; CREATE TABLE outbox.message_default"
        " PARTITION OF outbox.message DEFAULT",
        *("partitions", "error", "is a DEFAULT partition", "DETACH PARTITION"),
    ),
    "a partition belongs to another role": (
        f"DO $$ BEGIN EXECUTE 'ALTER TABLE ' || {IN_DAYS.format(2)} ||"
        " ' OWNER TO pillarbox_maintainer'; END $$",
        *("partitions", "error", "belongs to pillarbox_maintainer", "OWNER TO"),
    ),
    "a partition begins in another time zone": (
        "SET ROLE pillarbox_owner; CREATE TABLE outbox.message_odd PARTITION OF"
        " outbox.message FOR VALUES FROM ('2040-01-01 05:00+00')"
        " TO ('2040-01-02 05:00+00')",
        *("partitions", "error", "not at midnight UTC", "DROP TABLE"),
    ),
    "pg_partman drops by itself": (
        f"UPDATE partman.part_config SET retention = '3 days' WHERE {MESSAGE}",
        *("retention", "error", "itself drops days", "SET retention = NULL"),
    ),
    "pg_partman's upkeep is off": (
        f"UPDATE partman.part_config SET automatic_maintenance = 'off' WHERE {MESSAGE}",
        *("retention", "error", "is switched off", "automatic_maintenance = 'on'"),
    ),
    "pg_partman forgot a table": (
        f"DELETE FROM partman.part_config WHERE {MESSAGE}",
        *("retention", "error", "does not know outbox.message", "adopt_table"),
    ),
    "receipts go too soon": (
        "UPDATE outbox.partition_policy SET retention = '2 days'"
        " WHERE parent_table = 'inbox.receipt'",
        *("retention", "warning", "can come back", "outbox retention set"),
    ),
    "nobody relays": (
        "INSERT INTO outbox.message (id, created_at, lane, topic, content_type,"
        " payload) VALUES (outbox.uuid7(), now(), 0, 't', 'c', '');"
        " UPDATE outbox.message SET available_at = now() - interval '1 hour',"
        " created_at = date_trunc('day', now(), 'UTC')",
        *("backlog", "warning", "has waited", "relay run"),
    ),
    "a pooler hands one session to two": (
        # Two connections find themselves in one process, as they would behind it.
        "CREATE SCHEMA pooled; CREATE FUNCTION pooled.pg_backend_pid() RETURNS int"
        " LANGUAGE sql RETURN 7; DO $$ BEGIN EXECUTE format('ALTER DATABASE %I"
        " SET search_path = pooled, pg_catalog', current_database()); END $$",
        *("pooler", "error", "a pooler in transaction mode", "PostgreSQL itself"),
    ),
    "a replication slot is read by nobody": (
        "SELECT pg_create_physical_replication_slot('forgotten_' || pg_backend_pid())",
        *("pins", "warning", "that nobody reads", "pg_drop_replication_slot"),
    ),
}


@pytest.fixture
def no_slots(database_url: str) -> Iterator[None]:
    yield
    execute(
        database_url,
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
        " WHERE slot_name LIKE 'forgotten%'",
    )


def test_nothing_is_wrong_with_a_new_schema(
    database_url: str, doctor: Doctor, capsys: Capture
) -> None:
    assert doctor(database_url)[1] == []

    main(["doctor", "--database", database_url])
    assert "ok       partitions" in capsys.readouterr().out


@pytest.mark.usefixtures("no_slots")
@pytest.mark.parametrize("broken", BROKEN)
def test_the_doctor_finds_that(broken: str, database_url: str, doctor: Doctor) -> None:
    breaking, check, severity, finding, remedy = BROKEN[broken]
    execute(database_url, breaking)

    status, findings = doctor(database_url)

    (found,) = (f for f in findings if finding in f["finding"])
    assert (found["check"], found["severity"]) == (check, severity)
    assert remedy in found["remedy"]
    assert status == (3 if severity == "error" else 1)


def test_what_holds_a_partition_is_shown_by_the_remedy(
    database_url: str, doctor: Doctor
) -> None:
    old_partition(database_url)
    add_old(database_url)

    _, findings = doctor(database_url)

    (held,) = (f for f in findings if "and held" in f["finding"])
    assert len(execute(database_url, held["remedy"])) == 1
    # It has waited for twenty days, more than half of its retention.
    assert "error" in {f["severity"] for f in findings if f["check"] == "backlog"}


def test_a_partition_that_should_be_gone_for_hours(
    database_url: str, doctor: Doctor
) -> None:
    old_partition(database_url)

    _, findings = doctor(database_url)

    (late,) = (f for f in findings if f["check"] == "retention")
    assert "next step: detach" in late["finding"]
    assert "outbox maintain" in late["remedy"]


def test_the_monitor_looks_at_most_and_says_what_it_may_not(
    database_url: str, doctor: Doctor
) -> None:
    status, findings = doctor(f"{database_url}?options=-crole%3Dpillarbox_monitor")

    assert status in {0, 1}
    assert {f["check"] for f in findings} == {"cron", "pins"}
    assert {f["severity"] for f in findings} == {"unknown"}


def test_a_database_without_the_schema(empty_database_url: str) -> None:
    assert main(["doctor", "--database", empty_database_url]) == 2


def test_a_server_that_does_not_load_pg_cron_runs_nothing(
    doctor: Doctor,
) -> None:
    with postgres_server(
        settings={"shared_preload_libraries": ""}, durable=False, docker=False
    ) as bare:
        migrate(bare.url, with_cron=False)
        status, (found, *others) = doctor(bare.url)
        assert others == []

    assert (status, found["check"]) == (1, "cron")
    assert "is not installed" in found["finding"]
    assert "outbox maintain" in found["remedy"]


def test_a_launcher_that_does_not_run(doctor: Doctor) -> None:
    with postgres_server(
        settings={"max_worker_processes": "0"}, durable=False, docker=False
    ) as idle:
        migrate(idle.url)
        findings = doctor(idle.url)[1]

    (found,) = (f for f in findings if "launcher" in f["finding"])
    assert (found["check"], found["severity"]) == ("cron", "error")
    assert "NOT IN (SELECT rolname FROM pg_roles)" in found["remedy"]


def test_jobs_that_are_gone_off_silent_or_failing(
    private_server: PostgresServer, doctor: Doctor
) -> None:
    url = private_server.url
    migrate(url)
    wait_for(
        "launcher",
        lambda: execute(
            url,
            "SELECT 1 FROM pg_stat_activity WHERE backend_type = 'pg_cron launcher'",
        ),
    )
    upkeep = "(SELECT jobid FROM cron.job WHERE jobname = 'pillarbox upkeep')"
    ran = (
        "INSERT INTO cron.job_run_details (jobid, runid, status, return_message,"
        f" username, start_time, end_time) SELECT {upkeep}, %s, %s, 'upkeep: no lock',"
        " 'pillarbox_maintainer', now() - %s, now() - %s"
    )

    def about_upkeep() -> list[Any]:
        found = [f for f in doctor(url)[1] if "'pillarbox upkeep'" in f["finding"]]
        return [f["severity"] for f in found] + [f["finding"] for f in found]

    assert "has not run yet" in about_upkeep()[1]
    hours = timedelta(hours=5)
    execute(url, ran, (1, "succeeded", hours, hours))
    execute(url, ran, (2, "failed", hours, hours))
    severity, finding = about_upkeep()
    assert severity == "error"
    assert "its last failure: upkeep: no lock" in finding
    execute(url, ran, (3, "succeeded", timedelta(0), timedelta(0)))
    assert about_upkeep() == []
    execute(url, f"UPDATE cron.job SET active = false WHERE jobid = {upkeep}")
    assert "is switched off" in about_upkeep()[1]
    execute(url, f"SELECT cron.unschedule({upkeep})")
    assert "is gone" in about_upkeep()[1]
    # The monitor may not see jobs: that is said, and no alarm.
    found = doctor(f"{url}?options=-crole%3Dpillarbox_monitor")[1]
    jobs = [f for f in found if f["check"] == "cron"]
    assert {f["severity"] for f in jobs} == {"unknown"}
