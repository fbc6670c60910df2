"""What somebody changed in the schema: the doctor reports it, migrate restores it."""

import pytest

from pillarbox import Message
from tests.fixtures.doctor import Doctor
from tests.fixtures.postgres import migrate_for_a_week
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute

CHANGED = {
    "a sequence that caches": (
        "ALTER SEQUENCE outbox.message_seq CACHE 50",
        "outbox.message_seq has another definition: AS bigint INCREMENT 1",
    ),
    "another sequence that caches": (
        "ALTER SEQUENCE inbox.deferral_entry_seq CACHE 2",
        "inbox.deferral_entry_seq has another definition: AS bigint INCREMENT 1",
    ),
    "a sequence with another step": (
        "ALTER SEQUENCE inbox.message_seq INCREMENT 10",
        "inbox.message_seq has another definition: AS bigint INCREMENT 10",
    ),
    "a sequence that cycles": (
        "ALTER SEQUENCE outbox.deferral_entry_seq MAXVALUE 99 CYCLE",
        "outbox.deferral_entry_seq has another definition: AS bigint",
    ),
    "a default that is gone": (
        "ALTER TABLE outbox.message ALTER COLUMN seq DROP DEFAULT",
        "outbox.message lacks its default of seq",
    ),
    "another default": (
        "ALTER TABLE outbox.message ALTER COLUMN created_at SET DEFAULT now()",
        "outbox.message has another default of created_at: now()",
    ),
    "the default of a receipt": (
        "ALTER TABLE inbox.foreign_receipt ALTER COLUMN received_at SET DEFAULT now()",
        "inbox.foreign_receipt has another default of received_at: now()",
    ),
    "a trigger that is switched off": (
        "ALTER TABLE outbox.message DISABLE TRIGGER ALL",
        "outbox.message has another trigger message_doorbell: disabled",
    ),
    "a trigger that is gone": (
        "DROP TRIGGER message_doorbell ON inbox.message",
        "inbox.message lacks its trigger message_doorbell",
    ),
    "a constraint that is gone": (
        "ALTER TABLE outbox.position DROP CONSTRAINT late_part",
        'outbox."position" lacks its constraint late_part',
    ),
    "a limit that is gone": (
        "ALTER TABLE outbox.message DROP CONSTRAINT payload_size",
        "outbox.message lacks its constraint payload_size",
    ),
    "a constraint that refuses nothing": (
        "ALTER TABLE inbox.receipt DROP CONSTRAINT message_at_from_id,"
        " ADD CONSTRAINT message_at_from_id CHECK (true)",
        "inbox.receipt has another constraint message_at_from_id",
    ),
    "a key that is gone, without which receipts keep out no duplicates": (
        "ALTER TABLE inbox.receipt DROP CONSTRAINT receipt_pkey",
        "inbox.receipt lacks its index inbox.receipt_pkey",
    ),
    "an index that is gone": (
        "DROP INDEX outbox.position_seq_idx",
        'outbox."position" lacks its index outbox.position_seq_idx',
    ),
    "a column that accepts null": (
        "ALTER TABLE outbox.message ALTER COLUMN topic DROP NOT NULL",
        "outbox.message lacks its NOT NULL of topic",
    ),
    "a table that a crash would empty": (
        "ALTER TABLE outbox.message_template SET UNLOGGED",
        "outbox.message_template is unlogged",
    ),
    "a function with its caller's rights": (
        "ALTER FUNCTION outbox.make_days() SECURITY INVOKER",
        "outbox.make_days() runs with other rights",
    ),
    "a foreign key of the policy": (
        "ALTER TABLE outbox.partition_policy"
        " DROP CONSTRAINT kept_as_the_table_that_it_follows",
        "outbox.partition_policy lacks its constraint kept_as_the_table",
    ),
    "a constraint of the policy": (
        "ALTER TABLE outbox.partition_policy DROP CONSTRAINT premake_at_least_three",
        "outbox.partition_policy lacks its constraint premake_at_least_three",
    ),
}
TO_THE_SAME_OBJECTS = {
    "a trigger for replicas only": (
        "ALTER TABLE inbox.message ENABLE REPLICA TRIGGER message_doorbell",
        "inbox.message has another trigger message_doorbell",
    ),
    "a function with its caller's search_path": (
        "ALTER FUNCTION outbox.make_days() RESET search_path",
        "outbox.make_days() runs with other rights",
    ),
    "another index": (
        "DROP INDEX outbox.position_seq_idx;"
        " CREATE INDEX position_seq_idx ON outbox.position (up_to)",
        'outbox."position" has another index outbox.position_seq_idx',
    ),
    "a trigger that ignores prepared transactions": (
        "DROP TRIGGER message_doorbell ON outbox.message;"
        " CREATE TRIGGER message_doorbell BEFORE INSERT ON outbox.message"
        " FOR EACH STATEMENT EXECUTE FUNCTION outbox.ring_doorbell('outbox_message')",
        "outbox.message has another trigger message_doorbell: CREATE TRIGGER",
    ),
}


def differences(doctor: Doctor, url: str) -> list[str]:
    return [f["finding"] for f in doctor(url)[1] if f["check"] == "schema"]


@pytest.mark.parametrize(
    "changes", [CHANGED, TO_THE_SAME_OBJECTS], ids=["first", "others"]
)
def test_each_change_is_reported_and_migrate_restores_it(
    database_url: str, doctor: Doctor, changes: dict[str, tuple[str, str]]
) -> None:
    assert differences(doctor, database_url) == []
    for statement, _ in changes.values():
        execute(database_url, statement)

    found = doctor(database_url)[1]
    assert {f["check"] for f in found} == {"schema"}
    for change, (_, finding) in changes.items():
        assert sum(finding in f["finding"] for f in found) == 1, change
    assert len(found) == len(changes)
    assert {f["remedy"] for f in found} == {"pillarbox migrate --without-cron"}

    migrate_for_a_week(database_url)
    assert doctor(database_url)[1] == []
    migrate_for_a_week(database_url)
    assert doctor(database_url)[1] == []


def test_a_sequence_that_was_set_back_is_advanced(
    database_url: str, doctor: Doctor
) -> None:
    execute(
        database_url,
        "INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages,"
        " lane, reader, owner, snapshot) VALUES (date_trunc('day', now(), 'UTC'),"
        " now(), 1, 500, 1, 0, 'main', gen_random_uuid(), '1:1:')",
    )
    execute(database_url, "SELECT setval('outbox.message_seq', 600)")
    assert differences(doctor, database_url) == []
    execute(database_url, "ALTER SEQUENCE outbox.message_seq RESTART")

    (found,) = differences(doctor, database_url)
    assert found.startswith("outbox.message_seq was set back below 500")
    migrate_for_a_week(database_url)
    assert differences(doctor, database_url) == []
    insert(database_url, Message("next", b""))
    assert execute(database_url, "SELECT seq FROM outbox.message") == [(501,)]


def test_what_was_given_away_is_reported_and_migrate_gives_it_back(
    database_url: str, doctor: Doctor
) -> None:
    given = (
        *(
            "TABLE inbox.receipt",
            "TABLE outbox.reader",
            "TABLE outbox.message_template",
        ),
        *("SEQUENCE outbox.message_seq", "FUNCTION outbox.make_days()", "SCHEMA inbox"),
    )
    for by_remedies in (True, False):
        for object in given:
            execute(database_url, f"ALTER {object} OWNER TO CURRENT_USER")
        findings = [f for f in doctor(database_url)[1] if f["check"] == "schema"]
        assert sorted(f["finding"] for f in findings) == sorted(
            f"{object.partition(' ')[2]} is owned by postgres" for object in given
        )
        if by_remedies:
            for finding in findings:
                execute(database_url, finding["remedy"])
        else:
            migrate_for_a_week(database_url)
        assert doctor(database_url)[1] == []


def test_tables_that_were_not_given_away_are_not_reported_with_one_that_was(
    database_url: str, doctor: Doctor
) -> None:
    execute(database_url, "ALTER TABLE outbox.message OWNER TO CURRENT_USER")
    found = doctor(database_url)[1]
    # The functions of the owner can't read the table any more, either.
    for finding in found:
        if finding["check"] == "readers":
            assert "permission denied for table message" in finding["finding"]
    findings = [f for f in found if f["check"] == "schema"]
    assert {f["check"] for f in found} == {"schema", "roles", "readers"}
    assert [f["finding"] for f in findings] == ["outbox.message is owned by postgres"]
    execute(database_url, findings[0]["remedy"])
    assert doctor(database_url)[1] == []


def test_a_key_that_rows_violate_is_not_restored_but_reported(
    database_url: str, doctor: Doctor
) -> None:
    execute(database_url, "ALTER TABLE inbox.receipt DROP CONSTRAINT receipt_pkey")
    execute(
        database_url,
        "INSERT INTO inbox.receipt (message_id, message_at, consumer)"
        " SELECT id, inbox.moment_of(id), 'billing'"
        " FROM (SELECT outbox.uuid7() AS id) x, generate_series(1, 2)",
    )
    migrate_for_a_week(database_url)
    (found,) = differences(doctor, database_url)
    assert found == "inbox.receipt lacks its index inbox.receipt_pkey"
