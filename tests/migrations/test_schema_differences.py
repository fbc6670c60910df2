"""What somebody changed in the schema: the doctor reports it, migrate restores it."""

import pytest

from outbox import Message
from outbox.administration.migrate import migrate
from tests.fixtures.doctor import Doctor
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute

CHANGED = {
    "a sequence that caches": (
        "ALTER SEQUENCE outbox.message_seq CACHE 50",
        "outbox.message_seq takes numbers in steps of 1, caches 50 of them",
    ),
    "another sequence that caches": (
        "ALTER SEQUENCE inbox.redelivery_entry_seq CACHE 2",
        "inbox.redelivery_entry_seq takes numbers in steps of 1, caches 2",
    ),
    "a sequence with another step": (
        "ALTER SEQUENCE inbox.delivery_seq INCREMENT 10",
        "inbox.delivery_seq takes numbers in steps of 10",
    ),
    "a sequence that cycles": (
        "ALTER SEQUENCE outbox.deferral_entry_seq MAXVALUE 99 CYCLE",
        "outbox.deferral_entry_seq takes numbers in steps of 1, caches 1 of them,"
        " starts again at its end",
    ),
    "a default that is gone": (
        "ALTER TABLE outbox.message ALTER COLUMN seq DROP DEFAULT",
        "outbox.message.seq has the default null",
    ),
    "another default": (
        "ALTER TABLE outbox.message ALTER COLUMN created_at SET DEFAULT now()",
        "outbox.message.created_at has the default now()",
    ),
    "the default of a receipt": (
        "ALTER TABLE inbox.foreign_receipt ALTER COLUMN received_at SET DEFAULT now()",
        "inbox.foreign_receipt.received_at has the default now()",
    ),
    "a trigger that is switched off": (
        "ALTER TABLE outbox.message DISABLE TRIGGER ALL",
        "outbox.message has disabled its trigger message_doorbell",
    ),
    "a trigger that is gone": (
        "DROP TRIGGER delivery_doorbell ON inbox.delivery",
        "inbox.delivery has no trigger delivery_doorbell",
    ),
    "a trigger for replicas only": (
        "ALTER TABLE outbox.partition_policy ENABLE REPLICA TRIGGER"
        " partition_policy_updated",
        "outbox.partition_policy has disabled its trigger partition_policy_updated",
    ),
    "a constraint that is gone": (
        "ALTER TABLE outbox.settlement DROP CONSTRAINT stretch_limited",
        "outbox.settlement has no constraint stretch_limited",
    ),
    "a limit that is gone": (
        "ALTER TABLE outbox.message DROP CONSTRAINT payload_size",
        "outbox.message has no constraint payload_size",
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
        "DROP INDEX outbox.settlement_lane_idx",
        "outbox.settlement lacks its index outbox.settlement_lane_idx",
    ),
    "a column that accepts null": (
        "ALTER TABLE outbox.message ALTER COLUMN topic DROP NOT NULL",
        "outbox.message.topic accepts null",
    ),
    "a table that a crash would empty": (
        "ALTER TABLE outbox.message_template SET UNLOGGED",
        "outbox.message_template is unlogged",
    ),
    "a function with its caller's rights": (
        "ALTER FUNCTION outbox.make_days() SECURITY INVOKER",
        "outbox.make_days() runs with other rights",
    ),
    "a function with its caller's search_path": (
        "ALTER FUNCTION outbox.make_days() RESET search_path",
        "outbox.make_days() runs with other rights",
    ),
    "a constraint of the policy": (
        "ALTER TABLE outbox.partition_policy DROP CONSTRAINT premake_at_least_three",
        "outbox.partition_policy has no constraint premake_at_least_three",
    ),
}


def differences(doctor: Doctor, url: str) -> list[str]:
    return [f["finding"] for f in doctor(url)[1] if f["check"] == "schema"]


@pytest.mark.parametrize("change", CHANGED)
def test_a_change_is_reported_and_migrate_restores_it(
    database_url: str, doctor: Doctor, change: str
) -> None:
    statement, finding = CHANGED[change]
    assert differences(doctor, database_url) == []
    execute(database_url, statement)

    (found,) = differences(doctor, database_url)
    assert finding in found
    (remedy,) = (f["remedy"] for f in doctor(database_url)[1])
    assert remedy == "pillarbox migrate --without-cron"

    migrate(database_url, with_cron=False)
    assert doctor(database_url)[1] == []
    migrate(database_url, with_cron=False)
    assert doctor(database_url)[1] == []


def test_a_sequence_that_was_set_back_is_advanced(
    database_url: str, doctor: Doctor
) -> None:
    execute(
        database_url,
        "INSERT INTO outbox.watermark (created_at, above, up_to, messages, lane)"
        " VALUES (date_trunc('day', now(), 'UTC'), -1, 500, 1, 0)",
    )
    execute(database_url, "SELECT setval('outbox.message_seq', 600)")
    assert differences(doctor, database_url) == []
    execute(database_url, "ALTER SEQUENCE outbox.message_seq RESTART")

    (found,) = differences(doctor, database_url)
    assert found.startswith("outbox.message_seq was set back below 500")
    migrate(database_url, with_cron=False)
    assert differences(doctor, database_url) == []
    insert(database_url, Message("next", b""))
    assert execute(database_url, "SELECT seq FROM outbox.message") == [(501,)]


@pytest.mark.parametrize(
    "object",
    [
        "TABLE inbox.receipt",
        "TABLE outbox.broker",
        "TABLE outbox.message_template",
        "SEQUENCE outbox.message_seq",
        "FUNCTION outbox.make_days()",
        "SCHEMA inbox",
    ],
)
def test_what_was_given_away_is_reported_and_migrate_gives_it_back(
    object: str, database_url: str, doctor: Doctor
) -> None:
    name = object.partition(" ")[2]
    for restore in (
        lambda finding: execute(database_url, finding["remedy"]),
        lambda _: migrate(database_url, with_cron=False),
    ):
        execute(database_url, f"ALTER {object} OWNER TO CURRENT_USER")
        findings = [f for f in doctor(database_url)[1] if f["check"] == "schema"]
        assert [f["finding"] for f in findings] == [f"{name} is owned by postgres"]
        restore(findings[0])
        assert doctor(database_url)[1] == []


def test_tables_that_were_not_given_away_are_not_reported_with_one_that_was(
    database_url: str, doctor: Doctor
) -> None:
    execute(database_url, "ALTER TABLE outbox.message OWNER TO CURRENT_USER")
    findings = [f for f in doctor(database_url)[1] if f["check"] != "roles"]
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
    migrate(database_url, with_cron=False)
    (found,) = differences(doctor, database_url)
    assert found == "inbox.receipt lacks its index inbox.receipt_pkey"
