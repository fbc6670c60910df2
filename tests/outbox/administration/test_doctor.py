"""The doctor finds what each test breaks on purpose, and names the remedy."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from pillarbox.outbox.administration.doctor import examine_quickly
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.message_id import uuid7
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.consumers import id_of
from tests.fixtures.doctor import Doctor
from tests.fixtures.pasting import paste
from tests.fixtures.positions import defer
from tests.fixtures.postgres import WITHOUT_PARTMAN
from tests.fixtures.sessions import execute
from tests.fixtures.upkeep import run_upkeep
from tests.outbox.administration.broken import BROKEN, OTHERWISE, SEEN, TOGETHER
from tests.outbox.administration.retiring import leave_detached
from tests.outbox.administration.test_upkeep import add_old, old_partition

Capture = pytest.CaptureFixture[str]
DROP_LAST_DAY = """
DO $$
DECLARE
    v_partition text;
BEGIN
    FOR v_partition IN
        SELECT x.partition FROM outbox.partition_policy p
         CROSS JOIN LATERAL (SELECT q.partition FROM outbox.partitions(p.parent_table) q
                              ORDER BY q.starts_at DESC LIMIT 1) x
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


def test_the_last_day_ahead_may_be_missing_until_the_next_upkeep(
    database_url: str, doctor: Doctor, capsys: Capture
) -> None:
    assert doctor(database_url)[1] == []
    main(["doctor", "--database", database_url])
    assert "ok       partitions" in capsys.readouterr().out
    execute(database_url, "CALL outbox.maintain()")

    execute(database_url, DROP_LAST_DAY)
    assert doctor(database_url)[1] == []
    assert main(["status", "--database", database_url]) == 0

    execute(database_url, DROP_LAST_DAY)
    status, findings = doctor(database_url)
    overall = main(["status", "--database", database_url])
    assert {it["check"] for it in findings} == {"partitions"}
    assert all("lacks 2 partitions" in it["finding"] for it in findings)
    assert (status, overall) == (3, 3)
    assert "outbox.message lacks 2 partitions" in capsys.readouterr().out


def break_and_examine(
    url: str, problems: list[str], doctor: Doctor
) -> list[dict[str, str]]:
    """Return what the doctor finds, which must include each of the problems."""
    if WITHOUT_PARTMAN:
        problems = [problem for problem in problems if "partman" not in problem]
    for problem in problems:
        execute(url, BROKEN[problem][0])
    status, findings = doctor(url)
    severities = set()
    for problem in problems:
        _, check, severity, finding, remedy = BROKEN[problem]
        found = [
            f for f in findings if (f["check"], f["severity"]) == (check, severity)
        ]
        assert any(finding in f["finding"] and remedy in f["remedy"] for f in found), (
            problem
        )
        severities.add(severity)
    assert status == (3 if "error" in severities else 1)
    return findings


@pytest.mark.parametrize("group", TOGETHER)
def test_the_doctor_finds_each_problem_and_its_remedy_repairs_it(
    group: str, database_url: str, doctor: Doctor
) -> None:
    findings = break_and_examine(database_url, TOGETHER[group], doctor)

    for remedy in dict.fromkeys(f["remedy"] for f in findings):
        paste(database_url, remedy)
    # The first remedies can reveal further problems.
    for finding in doctor(database_url)[1]:
        paste(database_url, finding["remedy"])

    assert doctor(database_url)[1] == []
    run_upkeep(database_url)


@pytest.mark.usefixtures("drop_slots")
@pytest.mark.parametrize("group", OTHERWISE)
def test_the_doctor_finds_each_problem_that_a_person_has_to_solve(
    group: str, database_url: str, doctor: Doctor
) -> None:
    break_and_examine(database_url, OTHERWISE[group], doctor)


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
    assert "find its owner" in found["remedy"]
    assert "DROP" not in found["remedy"].upper()


def test_the_remedy_shows_the_rows_that_hold_a_partition(
    database_url: str, doctor: Doctor
) -> None:
    old_partition(database_url)
    add_old(database_url)
    old_partition(database_url, 40, "inbox.dead_letter")
    execute(
        database_url,
        "INSERT INTO inbox.dead_letter (created_at, origin, message_id, topic,"
        " attempts, schema_version, content_type, headers, payload, error_reason)"
        " SELECT min(starts_at), 'o', 'm', 't', 1, 1, 'c', '{}', '', 'why'"
        " FROM outbox.partitions('inbox.dead_letter')",
    )

    _, findings = doctor(database_url)

    letters, messages = (f["remedy"] for f in findings if "and held" in f["finding"])
    assert "status = 'PENDING'" in letters
    assert messages.startswith("SELECT * FROM outbox.unsettled_messages(")
    for remedy in (letters, messages):
        assert len(paste(database_url, remedy).splitlines()) == 1
    (behind,) = (f for f in findings if f["check"] == "readers")
    assert "reader main has a backlog of 1 message, the" in behind["finding"]
    held = r" and keeps 1 day, (\d+) kB, from being dropped$"
    size = (
        "SELECT sum(pg_total_relation_size(x.partition)) FROM unnest(ARRAY['message',"
        " 'position', 'deferral']) AS t, outbox.partitions('outbox.' || t) AS x"
        " WHERE x.starts_at = (SELECT date_trunc('day', min(created_at), 'UTC')"
        " FROM outbox.message)"
    )
    ((bytes_held,),) = execute(database_url, size)
    found = re.search(held, behind["finding"])
    assert found is not None
    assert int(found[1]) == round(bytes_held / 1024)
    assert behind["remedy"].startswith("pillarbox relay --reader main  # or, if it is")
    assert behind["remedy"].endswith("no longer needed, pillarbox readers drop main")
    (backlog,) = (f for f in findings if f["check"] == "backlog")
    assert backlog["severity"] == "error"
    # In the first hour of a day, the wait is an hour short of 20 days.
    waited = r"has been waiting for (19|20)d, more than half of its retention"
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


def test_checks_that_a_role_cannot_run_rank_above_warnings_and_below_errors(
    database_url: str, doctor: Doctor
) -> None:
    run_upkeep(database_url)
    assert doctor(database_url) == (0, [])
    as_role = f"{database_url}?options=-crole%3Dpillarbox_"
    status, findings = doctor(f"{as_role}application")
    assert status == 4
    assert {f["severity"] for f in findings} == {"unknown"}
    assert len({f["check"] for f in findings}) > 5

    monitor = f"{as_role}monitor"
    status, findings = doctor(monitor)
    assert status == 4
    assert {(f["check"], f["severity"]) for f in findings} == {("sessions", "unknown")}
    execute(database_url, "SELECT outbox.note_failure('of this hour')")
    status, findings = doctor(monitor)
    assert (status, {f["severity"] for f in findings}) == (4, {"unknown", "warning"})

    execute(
        database_url,
        "UPDATE outbox.upkeep SET succeeded_at = now() - interval '4 hours'",
    )
    assert doctor(monitor)[0] == 3


def test_a_transaction_that_stays_open_is_terminated(
    database_url: str, doctor: Doctor
) -> None:
    execute(
        database_url,
        SEEN.format(
            "pg_stat_activity",
            "SELECT datname, pid, usename, state, backend_type, application_name,"
            " usesysid, client_addr, backend_start, backend_xid, backend_xmin,"
            " now() - interval '2 hours' AS xact_start"
            " FROM pg_stat_activity_itself WHERE application_name = 'forgotten'",
        ),
    )
    forgotten = psycopg.connect(database_url, application_name="forgotten")
    try:
        (found,) = doctor(database_url)[1]
        assert (found["check"], found["severity"]) == ("pins", "warning")
        assert "has been open for 2" in found["finding"]
        assert paste(database_url, found["remedy"]) == "t\n"
        with pytest.raises(psycopg.errors.AdminShutdown):
            forgotten.execute("SELECT 1")
    finally:
        forgotten.close()

    assert doctor(database_url)[1] == []


def test_a_prepared_transaction_is_committed(
    migrated_server: PostgresServer, doctor: Doctor
) -> None:
    url = migrated_server.url
    execute(
        url,
        SEEN.format(
            "pg_prepared_xacts",
            "SELECT gid, prepared - interval '2 hours' AS prepared, database, owner,"
            " transaction"
            " FROM pg_prepared_xacts_itself",
        ),
    )
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT outbox.add('t', '{}'::jsonb)")
        connection.execute("PREPARE TRANSACTION 'it''s forgotten'")
    (found,) = (f for f in doctor(url)[1] if f["check"] == "pins")
    assert found["severity"] == "warning"
    assert "prepared transaction it's forgotten of postgres" in found["finding"]

    paste(url, found["remedy"])

    assert not any(f["check"] == "pins" for f in doctor(url)[1])
    assert execute(url, "SELECT count(*) FROM outbox.message") == [(1,)]


def test_a_condition_that_cannot_be_run_is_shown(
    database_url: str, doctor: Doctor
) -> None:
    broken = {
        "inbox.job": ("unsettled", "nothing IS NULL"),
        "outbox.message": ("gate", "outbox.nothing"),
    }
    for table, (column, condition) in broken.items():
        old_partition(database_url, table=table)
        execute(
            database_url,
            f"UPDATE outbox.partition_policy SET {column} = %s WHERE parent_table = %s",
            (condition, table),
        )

    held = [f for f in doctor(database_url)[1] if "and held" in f["finding"]]

    for finding, (table, (_, condition)) in zip(held, broken.items(), strict=True):
        assert table in finding["finding"]
        assert "its unsettled rows can't be found" in finding["finding"]
        assert paste(database_url, finding["remedy"]) == f"{condition}\n"


def test_an_overdue_partition_is_reported_with_the_blocking_session(
    database_url: str, doctor: Doctor
) -> None:
    old_partition(database_url)
    assert [f for f in doctor(database_url)[1] if f["check"] == "retention"] == []
    # Only its detach is missing: the routines alone don't do that.
    execute(database_url, "CALL outbox.maintain()")
    leave_detached(database_url, 25)
    execute(
        database_url,
        "UPDATE outbox.upkeep SET awaited_at = now() - interval '4 hours';"
        " UPDATE outbox.retiring_partition SET planned_at = now() - interval '4 hours'",
    )
    late = [f for f in doctor(database_url)[1] if f["check"] == "retention"]
    for finding, step in zip(late, ("drop", "detach"), strict=True):
        assert (
            f"should have been dropped hours ago; next step: {step}"
            in (finding["finding"])
        )

    paste(database_url, late[0]["remedy"])

    assert late[0]["remedy"].endswith("-- then: pillarbox maintain")
    paste(database_url, "pillarbox maintain")
    assert doctor(database_url)[1] == []


def test_a_schema_of_a_newer_version_needs_a_newer_package(
    database_url: str, doctor: Doctor
) -> None:
    execute(database_url, "UPDATE outbox.alembic_version SET version_num = '0009'")
    (newer,) = doctor(database_url)[1]
    assert newer["remedy"] == "pip install --upgrade pillarbox"
