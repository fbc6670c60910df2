"""Statements that each role may execute, and statements that it may not."""

ADD = "SELECT outbox.add('t', '{}'::jsonb, key => 'k')"
RECEIVE = """
    INSERT INTO inbox.receipt (message_id, message_at, consumer)
    SELECT id, inbox.moment_of(id), 'billing' FROM (SELECT outbox.uuid7() AS id) AS m
"""
GIVE_UP = """
    INSERT INTO {schema}.dead_letter (origin, message_id, topic, attempts,
        schema_version, content_type, headers, payload, error_reason)
    VALUES ('o', 'm', 't', 1, 1, 'text/plain', '{{}}', '', 'why')
"""
SETTLE_DEAD_LETTERS = [
    "UPDATE {schema}.dead_letter SET status = 'SUCCEEDED', updated_at = now()",
    "UPDATE {schema}.dead_letter SET status = 'DISCARDED', updated_at = now(),"
    " discard_reason = 'why', discarded_by = session_user",
    "UPDATE {schema}.dead_letter SET retry_count = 1, retry_after = now(),"
    " error_reason = 'again', error_stacktrace = NULL, updated_at = now()",
]
REWRITE = """
    INSERT INTO {schema}.dead_letter (created_at, origin, message_id, topic, attempts,
        schema_version, content_type, headers, payload, error_reason)
    VALUES (now(), 'o', 'm', 't', 1, 1, 'text/plain', '{{}}', '', 'why')
"""
SUSPECT = """
    INSERT INTO inbox.suspect AS s (message_id, message_at, consumer, starts)
    SELECT id, inbox.moment_of(id), 'billing', 1
      FROM (SELECT outbox.uuid7() AS id) AS m
    ON CONFLICT (message_id, consumer, message_at)
    DO UPDATE SET starts = s.starts + 1, started_at = EXCLUDED.started_at,
                  is_open = true
    RETURNING starts
"""

SETTLE = """
    INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages, lane,
                                 reader, snapshot)
    VALUES (date_trunc('day', now(), 'UTC'), now(), 1, 1, 1, 0, 'main',
            '1:1:')
"""
DEFER = """
    INSERT INTO outbox.deferral (created_at, due_at, seq, id, lane, cause)
    VALUES (now(), now(), 1, gen_random_uuid(), 0, 'refused')
"""
ASK = """
    INSERT INTO outbox.operation (kind, selection, reason, asked_by, expected)
    VALUES ('discard', '{}', 'why', 'ann', 1)
"""
PAUSE = "SELECT outbox.pause('billing', NULL, 'why', 'ann')"
RESUME = "SELECT outbox.resume('billing', NULL, 'why', 'ann')"
CANCEL = """
    INSERT INTO inbox.job AS j (message_id, message_at, consumer, state,
                                cancel_requested_at, reason)
    SELECT id, inbox.moment_of(id), 'billing', 'waiting', now(), 'why'
      FROM (SELECT outbox.uuid7() AS id) AS m
    ON CONFLICT (message_id, consumer, message_at)
    DO UPDATE SET state = 'cancelled', finished_at = now(), reason = EXCLUDED.reason
    RETURNING state, worker
"""

ALLOWED = {
    "application": [ADD, "SELECT id, created_at FROM outbox.message"],
    "relay": [
        "SELECT * FROM outbox.message",
        SETTLE,
        DEFER,
        "SELECT * FROM outbox.position",
        "SELECT * FROM outbox.deferral",
        "SELECT outbox.cluster()",
        "SELECT last_value FROM outbox.deferral_entry_seq",
        GIVE_UP.format(schema="outbox"),
        "SELECT * FROM outbox.dead_letter",
        "SELECT * FROM outbox.dead_letter FOR UPDATE",
        "SELECT * FROM outbox.readable_dead_letter",
        *(query.format(schema="outbox") for query in SETTLE_DEAD_LETTERS),
        "SELECT * FROM outbox.partition_health",
        "SELECT failure, outbox.clock_problem() FROM outbox.upkeep_failure",
        "SELECT * FROM outbox.retiring_partition",
    ],
    "operator": [
        DEFER,
        "UPDATE outbox.reader SET role = 'billing_role' WHERE reader = 'main'",
        "UPDATE outbox.subscription SET ended_at = now() WHERE reader = 'main'",
        PAUSE,
        RESUME,
    ],
    "consumer": [
        RECEIVE,
        "SELECT outbox.paused_topics('billing')",
        "SELECT * FROM outbox.partition_health",
        "SELECT failure, outbox.clock_problem() FROM outbox.upkeep_failure",
        "SELECT * FROM outbox.retiring_partition",
        "SELECT * FROM outbox.upkeep_plan('inbox.receipt')",
        "SELECT * FROM inbox.receipt",
        "SELECT * FROM inbox.job",
        GIVE_UP.format(schema="inbox"),
        "SELECT * FROM inbox.readable_dead_letter",
        "SELECT * FROM inbox.dead_letter FOR UPDATE",
        *(query.format(schema="inbox") for query in SETTLE_DEAD_LETTERS),
        SUSPECT,
        "DELETE FROM inbox.suspect WHERE starts = 1",
    ],
    "maintainer": [
        "CALL outbox.maintain()",
        "SELECT * FROM outbox.partition_policy",
        "SELECT * FROM outbox.upkeep_plan()",
        "SELECT outbox.finish_detached('outbox.message')",
        "SELECT outbox.accept_clock()",
        "SELECT outbox.trim_batch('outbox.operation')",
    ],
    "detacher": [
        "SELECT * FROM outbox.upkeep_plan()",
        "SELECT outbox.finish_detached('outbox.message')",
        "SELECT outbox.detach_under_way()",
    ],
    "monitor": [
        "SELECT id, topic, key, available_at FROM outbox.message",
        "SELECT * FROM outbox.position",
        "SELECT * FROM outbox.deferral",
        "SELECT topic, error_reason, attempts FROM outbox.dead_letter",
        "SELECT * FROM outbox.partition_health",
        "SELECT count(*) FROM inbox.receipt",
        "SELECT message_id, starts, error_reason FROM inbox.suspect",
        "SELECT * FROM outbox.upkeep_plan()",
        "SELECT * FROM outbox.retiring_partition",
        "SELECT * FROM outbox.dropped_partition",
        "SELECT * FROM outbox.kept_partition",
        "SELECT * FROM outbox.operation",
        "SELECT * FROM outbox.upkeep",
        "SELECT topic, error_reason, discarded_by FROM inbox.dead_letter",
        "SELECT * FROM outbox.dead_letter_status",
        "SELECT * FROM inbox.dead_letter_status",
        "SELECT * FROM outbox.message_envelope",
        "SELECT * FROM outbox.message_life",
        "SELECT * FROM inbox.message_life",
        "SELECT message_id, state, worker FROM inbox.job",
    ],
    "web": [
        "SELECT topic, error_reason, discarded_by FROM inbox.dead_letter",
        "SELECT * FROM outbox.upkeep_plan()",
        ASK,
        "UPDATE outbox.operation SET state = 'stopping', stopped_by = 'w'"
        " WHERE state = 'running'",
        *(
            f"UPDATE {schema}.dead_letter SET status = 'DISCARDED',"
            " updated_at = now(), discard_reason = 'why', discarded_by = 'who'"
            " WHERE status = 'PENDING'"
            for schema in ("outbox", "inbox")
        ),
        RECEIVE,
        CANCEL,
        PAUSE,
        RESUME,
    ],
}
FORBIDDEN = {
    "web": [
        ADD,
        "SELECT outbox.trim_batch('outbox.operation')",
        "CALL outbox.maintain()",
        "SET ROLE pillarbox_owner",
    ],
    "application": [
        "SELECT outbox.make_days()",
        *(
            f"INSERT INTO outbox.message (id, lane, topic, content_type, payload,"
            f" {column}) VALUES (outbox.uuid7(), 0, 't', 'c', '', {value})"
            for column, value in (("created_at", "now()"), ("seq", "1"))
        ),
        "SELECT topic FROM outbox.message",
        "SELECT setval('outbox.message_seq', 1)",
        "CALL outbox.maintain()",
        "CREATE TABLE outbox.mine (id int)",
        "ALTER TABLE outbox.message DISABLE TRIGGER message_doorbell",
        "SELECT * FROM outbox.upkeep_plan()",
        "SET ROLE pillarbox_owner",
        "SET ROLE pillarbox_relay",
    ],
    "relay": [
        ADD,
        "SELECT nextval('outbox.message_seq')",
        "SELECT setval('outbox.deferral_entry_seq', 1)",
        REWRITE.format(schema="outbox"),
        "CALL outbox.maintain()",
        "SELECT outbox.make_partitions('outbox.message')",
        "TABLE partman.part_config",
        "SET ROLE pillarbox_owner",
        "SET ROLE pillarbox_operator",
        "UPDATE outbox.subscription SET ended_at = now()",
        "DELETE FROM outbox.subscription",
        "UPDATE outbox.reader SET role = 'mine'",
    ],
    "reader": [
        ADD,
        SETTLE.replace("now(), 1,", "now(), 2,"),
        DEFER,
        GIVE_UP.format(schema="outbox"),
        "SELECT setval('outbox.deferral_entry_seq', 1)",
        "SELECT * FROM outbox.dead_letter FOR UPDATE",
        "SELECT * FROM inbox.job",
        "INSERT INTO outbox.reader (reader) VALUES ('mine')",
        "UPDATE outbox.reader SET role = 'mine'",
        "UPDATE outbox.subscription SET ended_at = now()",
        "ALTER TABLE outbox.position DISABLE TRIGGER position_of_reader",
        "SET session_replication_role = replica",
        "CREATE TABLE outbox.mine (id int)",
        "SET ROLE pillarbox_relay",
        "SET ROLE pillarbox_owner",
    ],
    "consumer": [
        ADD,
        "SELECT nextval('outbox.message_seq')",
        REWRITE.format(schema="inbox"),
        "SELECT outbox.trim_batch('inbox.foreign_receipt')",
        "CALL outbox.maintain()",
        "SET ROLE pillarbox_owner",
    ],
    "maintainer": [
        ADD,
        "SELECT outbox.make_partition('outbox.message', now())",
        "SELECT outbox.set_interval('outbox.message', '1 hour', 48)",
        "DROP TABLE outbox.message",
        "SET ROLE pillarbox_detacher",
        "SET ROLE pillarbox_owner",
        "SELECT outbox.schedule_detaches()",
        "UPDATE partman.part_config SET retention = '1 day'",
        "CREATE TABLE outbox.mine (id int)",
    ],
    # It may become only the owner.
    "detacher": [
        *(f"SET ROLE pillarbox_{role}" for role in ("maintainer", "application")),
        *(f"SET ROLE pillarbox_{role}" for role in ("relay", "consumer", "monitor")),
        "ALTER ROLE pillarbox_owner LOGIN",
        "ALTER ROLE pillarbox_detacher SUPERUSER",
        "GRANT pillarbox_owner TO pillarbox_application",
        "CREATE ROLE mine",
        "CREATE DATABASE mine",
        "CREATE SCHEMA mine",
        "DROP SCHEMA partman",
        "DROP EXTENSION pg_partman",
        "COPY outbox.message TO PROGRAM 'true'",
        "SELECT pg_read_file('PG_VERSION')",
    ],
    "monitor": [
        ADD,
        "UPDATE partman.part_config SET retention = '1 day'",
        "SELECT outbox.finish_detached('outbox.message')",
        "SELECT outbox.end_upkeep(now(), false)",
        "SELECT outbox.accept_clock()",
        "CALL outbox.maintain()",
    ],
}
"""What CHANGES, UPDATED and the test of secret columns don't show."""
_OF_DEAD_LETTERS = ["inbox.dead_letter", "outbox.dead_letter"]
CHANGES = {
    "application": {"INSERT": ["outbox.message"]},
    "relay": {
        "INSERT": [
            *('outbox."position"', "outbox.dead_letter", "outbox.deferral"),
        ],
        "UPDATE": ["outbox.dead_letter", "outbox.reader"],
    },
    "reader": {
        "INSERT": ['outbox."position"', "outbox.dead_letter", "outbox.deferral"],
    },
    "operator": {"UPDATE": ["outbox.reader", "outbox.subscription"]},
    "consumer": {
        "INSERT": [
            *("inbox.dead_letter", "inbox.foreign_receipt", "inbox.job"),
            *("inbox.receipt", "inbox.suspect"),
        ],
        "UPDATE": ["inbox.dead_letter", "inbox.job", "inbox.suspect"],
        "DELETE": ["inbox.suspect"],
    },
    "web": {
        "INSERT": ["inbox.job", "inbox.receipt", "outbox.operation"],
        "UPDATE": [*_OF_DEAD_LETTERS, "inbox.job", "outbox.operation"],
    },
}
"""The tables whose rows each role may add, change or delete, at least some columns."""
_DISCARD = {"status", "updated_at", "discard_reason", "discarded_by"}
_RETRY = {"retry_count", "retry_after", "error_reason", "error_stacktrace"}
UPDATED = {
    ("relay", "outbox.dead_letter"): _DISCARD | _RETRY,
    ("relay", "outbox.reader"): {"broker", "broker_since"},
    ("operator", "outbox.reader"): {"role"},
    ("operator", "outbox.subscription"): {"ended_at"},
    ("consumer", "inbox.dead_letter"): _DISCARD | _RETRY,
    **{("web", table): _DISCARD for table in _OF_DEAD_LETTERS},
    ("web", "outbox.operation"): {
        *("state", "stopped_by", "succeeded", "skipped", "failed", "problem"),
        "finished_at",
    },
}
"""The columns that each role may change."""
DETACH = [
    "CREATE TABLE outbox.leaving PARTITION OF outbox.message"
    " FOR VALUES FROM ('2001-01-01') TO ('2001-01-02')",
    "ALTER TABLE outbox.message DETACH PARTITION outbox.leaving CONCURRENTLY",
    "DROP TABLE outbox.leaving",
]
