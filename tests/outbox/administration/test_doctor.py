"""The doctor finds what each test breaks on purpose, and names the remedy."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from outbox.administration.doctor import examine_quickly
from outbox.cli.main import main
from outbox.message_id import uuid7
from tests.fixtures.consumers import id_of
from tests.fixtures.doctor import Doctor
from tests.fixtures.pasting import paste
from tests.fixtures.positions import defer
from tests.fixtures.postgres import MigratedData, copied_server
from tests.fixtures.sessions import execute
from tests.fixtures.upkeep import run_upkeep
from tests.outbox.administration.broken import BROKEN, FAR_BEHIND, OTHERWISE, SEEN
from tests.outbox.administration.test_detach import leave_detached
from tests.outbox.administration.test_upkeep import add_old, old_partition

Capture = pytest.CaptureFixture[str]
DROP_LAST_DAYS = """
DO $$
DECLARE
    v_partition text;
BEGIN
    FOR v_partition IN
        SELECT x.partition FROM outbox.partition_policy p
         CROSS JOIN LATERAL (SELECT q.partition FROM outbox.partitions(p.parent_table) q
                              ORDER BY q.starts_at DESC LIMIT {days}) x
    LOOP
        EXECUTE 'DROP TABLE ' || v_partition;
    END LOOP;
END
$$
"""
OLD = datetime.now(UTC) - timedelta(days=40, hours=6)


@pytest.fixture
def drop_slots(database_url: str) -> Iterator[None]:
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


@pytest.mark.parametrize("days", [1, 2])
def test_the_last_day_ahead_may_be_missing_until_the_next_upkeep(
    days: int, database_url: str, doctor: Doctor, capsys: Capture
) -> None:
    execute(database_url, "CALL outbox.maintain()")
    execute(database_url, DROP_LAST_DAYS.format(days=days))

    status, findings = doctor(database_url)
    overall = main(["status", "--database", database_url])

    said = capsys.readouterr().out
    if days == 1:
        assert (findings, overall) == ([], 0)
    else:
        assert {it["check"] for it in findings} == {"partitions"}
        assert all("lacks 2 partitions" in it["finding"] for it in findings)
        assert (status, overall) == (3, 3)
        assert "outbox.message lacks 2 partitions" in said


@pytest.mark.usefixtures("drop_slots")
@pytest.mark.parametrize("broken", BROKEN)
def test_the_doctor_finds_each_problem_and_its_remedy_repairs_it(
    broken: str, database_url: str, doctor: Doctor
) -> None:
    breaking, check, severity, finding, remedy = BROKEN[broken]
    execute(database_url, breaking)

    status, findings = doctor(database_url)

    (found,) = (f for f in findings if finding in f["finding"] and f["check"] == check)
    assert found["severity"] == severity
    assert remedy in found["remedy"]
    assert status == (3 if severity == "error" else 1)
    if broken in OTHERWISE:
        return
    for _ in range(2):  # the first remedies can reveal further problems
        for each in doctor(database_url)[1]:
            paste(database_url, each["remedy"])
    if broken != FAR_BEHIND:  # the reader is a fake
        assert doctor(database_url)[1] == []
        run_upkeep(database_url)


def test_a_slot_without_a_reader_is_described_and_its_owner_is_to_be_found_first(
    database_url: str, doctor: Doctor
) -> None:
    execute(
        database_url,
        SEEN.format(
            "pg_replication_slots",
            "SELECT 'orders'::name AS slot_name, false AS active, NULL::xid AS xmin,"
            " NULL::int AS active_pid, 'logical' AS slot_type,"
            " 'pgoutput'::name AS plugin, 'shop'::name AS database,"
            " NULL::xid AS catalog_xmin, '0/0'::pg_lsn AS restart_lsn",
        ),
    )

    (found,) = doctor(database_url)[1]

    described = r"slot orders \(plugin pgoutput, database shop, keeps \d+ .B of WAL\)"
    assert re.search(described, found["finding"])
    assert "find its owner first" in found["remedy"]
    assert "DROP" not in found["remedy"].upper()


def test_the_remedy_shows_the_rows_that_hold_a_partition(
    database_url: str, doctor: Doctor
) -> None:
    old_partition(database_url)
    add_old(database_url)

    _, findings = doctor(database_url)

    (held,) = (f for f in findings if "and held" in f["finding"])
    assert held["remedy"].startswith("SELECT * FROM outbox.unsettled_messages(")
    assert len(paste(database_url, held["remedy"]).splitlines()) == 1
    (backlog,) = (f for f in findings if f["check"] == "backlog")
    assert backlog["severity"] == "error"
    # In the first hour of a day, the wait is an hour short of 20 days.
    waited = r"has waited for (19|20)d, more than half its retention"
    assert re.search(waited, backlog["finding"])


def test_the_doctor_reports_waiting_messages_as_status_does(
    database_url: str, doctor: Doctor
) -> None:
    execute(database_url, "CALL outbox.maintain()")
    for _ in range(2):
        execute(database_url, BROKEN["no relay runs"][0])
    first = "seq = (SELECT min(seq) FROM outbox.message)"
    assert defer(database_url, "refused", first) == 1

    _, found = doctor(database_url)
    with psycopg.connect(database_url, autocommit=True) as connection:
        _, findings = examine_quickly(connection)

    # Their durations differ slightly.
    text = [re.sub(r"\d+\w+", "", it.finding) for it in findings]
    assert len(text) == 2
    told = [re.sub(r"\d+\w+", "", it["finding"]) for it in found]
    assert sorted(told) == sorted(text)


def test_a_detached_partition_not_dropped_for_hours_is_found(
    database_url: str, doctor: Doctor
) -> None:
    leave_detached(database_url)
    execute(
        database_url,
        "UPDATE outbox.retiring_partition SET planned_at = now() - interval '4 hours'",
    )

    _, findings = doctor(database_url)

    (late,) = (f for f in findings if f["check"] == "retention")
    assert "should have been dropped hours ago; next step: drop" in late["finding"]


def test_the_remedy_shows_the_dead_letters_that_hold_a_partition(
    database_url: str, doctor: Doctor
) -> None:
    old_partition(database_url, 40, "inbox.dead_letter")
    execute(
        database_url,
        "INSERT INTO inbox.dead_letter (created_at, origin, message_id, topic,"
        " attempts, schema_version, content_type, headers, payload, error_reason)"
        " SELECT min(starts_at), 'o', 'm', 't', 1, 1, 'c', '{}', '', 'why'"
        " FROM outbox.partitions('inbox.dead_letter')",
    )

    (held,) = (f for f in doctor(database_url)[1] if "and held" in f["finding"])

    assert "status = 'PENDING'" in held["remedy"]


def test_dead_letters_that_outlive_their_receipts_are_found(
    database_url: str, doctor: Doctor
) -> None:
    letter = (
        "INSERT INTO inbox.dead_letter (origin, message_id, topic, attempts,"
        " schema_version, content_type, headers, payload, error_reason)"
        " VALUES ('o', %s, 't', 1, 1, 'c', '{}', '', 'why')"
    )
    foreign = ("evt_1", "01234567-89ab-7-order", str(id_of(OLD, version=4)))
    for message_id in (str(uuid7()), *foreign):
        execute(database_url, letter, (message_id,))
    assert {f["check"] for f in doctor(database_url)[1]} == {"failures"}

    execute(database_url, letter, (str(id_of(OLD)),))
    _, findings = doctor(database_url)

    (lost,) = (f for f in findings if f["check"] == "receipts")
    assert lost["finding"].startswith("1 dead letter of the inbox older than")
    assert "pillarbox retention set inbox.receipt 41d" in lost["remedy"]


def test_the_monitor_can_run_most_checks_and_names_the_others(
    database_url: str, doctor: Doctor
) -> None:
    status, findings = doctor(f"{database_url}?options=-crole%3Dpillarbox_monitor")

    assert status == 4
    assert {f["check"] for f in findings} == {"sessions"}
    assert {f["severity"] for f in findings} == {"unknown"}


def test_checks_that_the_role_cannot_run_have_their_own_status(
    database_url: str, doctor: Doctor
) -> None:
    run_upkeep(database_url)
    assert doctor(database_url) == (0, [])

    status, findings = doctor(f"{database_url}?options=-crole%3Dpillarbox_application")

    assert status == 4
    assert {f["severity"] for f in findings} == {"unknown"}
    assert len({f["check"] for f in findings}) > 5


def test_errors_rank_above_unknown_and_unknown_above_warnings(
    database_url: str, doctor: Doctor
) -> None:
    monitor = f"{database_url}?options=-crole%3Dpillarbox_monitor"
    run_upkeep(database_url)
    execute(database_url, "SELECT outbox.note_failure('of this hour')")
    status, findings = doctor(monitor)
    assert (status, {f["severity"] for f in findings}) == (4, {"unknown", "warning"})

    execute(
        database_url,
        "UPDATE outbox.upkeep SET succeeded_at = now() - interval '4 hours'",
    )
    assert doctor(monitor)[0] == 3


def test_the_doctor_fails_in_a_database_without_the_schema(
    empty_database_url: str,
) -> None:
    assert main(["doctor", "--database", empty_database_url]) == 2


def test_the_doctor_finds_nothing_wrong_with_a_server_without_pg_cron(
    migrated_data: MigratedData, doctor: Doctor
) -> None:
    data = migrated_data.directory(with_cron=False)
    with copied_server(data, shared_preload_libraries="") as bare:
        status, findings = doctor(bare.url)

    assert (status, findings) == (1, [])
