"""What somebody changed in the schema: the doctor reports it, migrate restores it."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from pillarbox import Message
from pillarbox.outbox.errors import MigrationError
from tests.fixtures.doctor import Doctor
from tests.fixtures.pasting import paste
from tests.fixtures.postgres import migrate_for_a_week
from tests.fixtures.relay import defer, insert
from tests.fixtures.roles import new_role
from tests.fixtures.sessions import execute

CHANGED = {
    "a sequence that caches": (
        "ALTER SEQUENCE outbox.message_seq CACHE 50",
        "outbox.message_seq has another definition: AS bigint INCREMENT 1",
    ),
    "a sequence that cycles": (
        "ALTER SEQUENCE outbox.deferral_entry_seq MAXVALUE 99 CYCLE",
        "outbox.deferral_entry_seq has another definition: AS bigint",
    ),
    "another default": (
        "ALTER TABLE outbox.message ALTER COLUMN created_at SET DEFAULT now()",
        "outbox.message has another default of created_at: now()",
    ),
    "a trigger that is switched off": (
        "ALTER TABLE outbox.message DISABLE TRIGGER ALL",
        "outbox.message has another trigger message_doorbell: disabled",
    ),
    "a trigger that is gone, without which a role stores what is others'": (
        "DROP TRIGGER deferral_of_reader ON outbox.deferral",
        "outbox.deferral lacks its trigger deferral_of_reader",
    ),
    "a constraint that is gone": (
        "ALTER TABLE outbox.position DROP CONSTRAINT late_part",
        'outbox."position" lacks its constraint late_part',
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
}
TO_THE_SAME_OBJECTS = {
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


def test_each_change_is_reported_and_migrate_restores_it(
    database_url: str, doctor: Doctor
) -> None:
    for changes in (CHANGED, TO_THE_SAME_OBJECTS):
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


def test_entries_after_a_sequence_was_set_back_follow_those_before(
    database_url: str, doctor: Doctor
) -> None:
    insert(database_url, *[Message("t", b"") for _ in range(3)])
    defer(database_url, "t")
    execute(database_url, "ALTER SEQUENCE outbox.deferral_entry_seq RESTART")

    found = differences(doctor, database_url)
    assert [it.partition(",")[0] for it in found] == [
        "outbox.deferral_entry_seq was set back below 3"
    ]
    migrate_for_a_week(database_url)
    assert differences(doctor, database_url) == []


def test_a_sequence_that_was_set_back_is_advanced(
    database_url: str, doctor: Doctor
) -> None:
    execute(
        database_url,
        "INSERT INTO outbox.message (id, seq, lane, topic, content_type, payload)"
        " VALUES (outbox.uuid7(), 500, 0, 'first', 't', '')",
    )
    execute(database_url, "SELECT setval('outbox.message_seq', 600)")
    assert differences(doctor, database_url) == []
    execute(database_url, "ALTER SEQUENCE outbox.message_seq RESTART")

    (found,) = differences(doctor, database_url)
    assert found.startswith("outbox.message_seq was set back below 500")
    migrate_for_a_week(database_url)
    assert differences(doctor, database_url) == []
    insert(database_url, Message("next", b""))
    seqs = execute(database_url, "SELECT seq FROM outbox.message ORDER BY seq")
    assert seqs == [(500,), (501,)]


@pytest.fixture
def dba(database_url: str) -> Iterator[str]:
    with new_role(database_url, f"dba_{uuid4().hex}") as role:
        yield role


def test_what_was_given_away_alone_is_reported_and_given_back(
    database_url: str, doctor: Doctor
) -> None:
    given = (
        *("TABLE inbox.receipt", "TABLE outbox.reader"),
        *("TABLE outbox.message", "TABLE outbox.message_template"),
        *("SEQUENCE outbox.message_seq", "FUNCTION outbox.make_days()", "SCHEMA inbox"),
    )
    for object in given:
        execute(database_url, f"ALTER {object} OWNER TO CURRENT_USER")
    findings = [f for f in doctor(database_url)[1] if f["check"] == "schema"]
    assert sorted(f["finding"] for f in findings) == sorted(
        f"{object.partition(' ')[2]} is owned by postgres" for object in given
    )
    for finding in findings:
        execute(database_url, finding["remedy"])
    assert doctor(database_url)[1] == []

    execute(database_url, "ALTER TABLE inbox.receipt OWNER TO CURRENT_USER")
    migrate_for_a_week(database_url)
    assert doctor(database_url)[1] == []


def test_reassigned_tables_are_reported_with_a_remedy_that_returns_ours_alone(
    database_url: str, dba: str, doctor: Doctor
) -> None:
    url = database_url
    execute(url, f"CREATE TABLE public.theirs (); ALTER TABLE theirs OWNER TO {dba}")
    execute(url, f"REASSIGN OWNED BY pillarbox_owner TO {dba}")

    (found,) = (f for f in doctor(url)[1] if f["check"] == "roles")
    assert found["severity"] == "error"
    assert f"the tables belong to {dba}, not to pillarbox_owner" in found["finding"]
    with pytest.raises(MigrationError, match="restore the roles"):
        migrate_for_a_week(url)

    paste(url, found["remedy"])

    assert doctor(url)[1] == []
    owner = (
        "SELECT relowner::regrole::text FROM pg_class WHERE oid = 'theirs'::regclass"
    )
    assert execute(url, owner) == [(dba,)]


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
