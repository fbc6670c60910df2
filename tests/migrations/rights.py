"""What each role may, and what it may not: statements to try."""

ADD = "SELECT outbox.add('t', '{}'::jsonb, key => 'k')"
RECEIVE = """
    INSERT INTO inbox.receipt (message_id, message_at, consumer)
    SELECT id, inbox.moment_of(id), 'billing' FROM (SELECT outbox.uuid7() AS id) AS m
"""
DELIVER = """
    INSERT INTO inbox.delivery (message_id, lane, schema_version, consumer, topic,
                                content_type, headers, payload)
    VALUES (outbox.uuid7(), 0, 1, 'billing', 't', 'text/plain', '{}', '')
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
REWRITE_DEAD_LETTERS = [
    *(
        f"UPDATE {{schema}}.dead_letter SET {column} = {column}"
        for column in (
            *("id", "created_at", "origin", "message_id", "topic", "key", "tenant"),
            *("attempts", "schema_version", "content_type", "headers", "payload"),
        )
    ),
    """
    INSERT INTO {schema}.dead_letter (created_at, origin, message_id, topic, attempts,
        schema_version, content_type, headers, payload, error_reason)
    VALUES (now(), 'o', 'm', 't', 1, 1, 'text/plain', '{{}}', '', 'why')
    """,
]
SUSPECT = """
    INSERT INTO inbox.suspect AS s (message_id, message_at, consumer, starts)
    SELECT id, inbox.moment_of(id), 'billing', 1
      FROM (SELECT outbox.uuid7() AS id) AS m
    ON CONFLICT (message_id, consumer, message_at)
    DO UPDATE SET starts = s.starts + 1, started_at = EXCLUDED.started_at,
                  is_open = true
    RETURNING starts
"""

ASK = """
    INSERT INTO outbox.operation (kind, selection, reason, asked_by, expected)
    VALUES ('discard', '{}', 'why', 'ann', 1)
"""
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
    "application": [ADD],
    "relay": [
        "SELECT * FROM outbox.message",
        "UPDATE outbox.message SET published_at = now()",
        "UPDATE outbox.message SET attempts = 1, available_at = now(), last_error = ''",
        GIVE_UP.format(schema="outbox"),
        "SELECT * FROM outbox.dead_letter",
        "SELECT * FROM outbox.dead_letter FOR UPDATE",
        "SELECT * FROM outbox.readable_dead_letter",
        *(query.format(schema="outbox") for query in SETTLE_DEAD_LETTERS),
        DELIVER,
        "SELECT * FROM inbox.subscription",
        "SELECT * FROM outbox.partition_health",
        "SELECT failure, outbox.clock_problem() FROM outbox.upkeep",
    ],
    "consumer": [
        RECEIVE,
        "SELECT * FROM inbox.receipt",
        "INSERT INTO inbox.subscription (consumer, topic) VALUES ('a', 't')",
        "SELECT * FROM inbox.delivery",
        "UPDATE inbox.delivery SET acked_at = now()",
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
    ],
    "detacher": [
        "SELECT * FROM outbox.upkeep_plan()",
        "SELECT outbox.finish_detached('outbox.message')",
        "SELECT outbox.detach_under_way()",
    ],
    "monitor": [
        "SELECT id, topic, key, attempts FROM outbox.message",
        "SELECT topic, error_reason, attempts FROM outbox.dead_letter",
        "SELECT * FROM outbox.partition_health",
        "SELECT count(*) FROM inbox.receipt",
        "SELECT * FROM inbox.suspect",
        "SELECT * FROM outbox.upkeep_plan()",
        "SELECT * FROM outbox.retiring_partition",
        "SELECT * FROM outbox.dropped_partition",
        "SELECT * FROM outbox.kept_partition",
        "SELECT * FROM outbox.upkeep",
        "SELECT * FROM partman.part_config",
        "SELECT last_error FROM outbox.message",
        "SELECT topic, error_reason, discarded_by FROM inbox.dead_letter",
    ],
    "web": [
        "SELECT topic, error_reason, discarded_by FROM inbox.dead_letter",
        "SELECT * FROM outbox.upkeep_plan()",
        ASK,
        "UPDATE outbox.operation SET state = 'running', worker = 'w'",
        *(
            f"UPDATE {schema}.dead_letter SET status = 'DISCARDED',"
            " updated_at = now(), discard_reason = 'why', discarded_by = 'who'"
            " WHERE status = 'PENDING'"
            for schema in ("outbox", "inbox")
        ),
        RECEIVE,
        CANCEL,
    ],
}
FORBIDDEN = {
    "web": [
        ADD,
        "SELECT payload FROM outbox.dead_letter",
        "SELECT headers FROM inbox.dead_letter",
        "SELECT error_stacktrace FROM inbox.dead_letter",
        "SELECT * FROM outbox.readable_dead_letter",
        "SELECT payload FROM outbox.message",
        "UPDATE outbox.message SET attempts = 1",
        "UPDATE inbox.dead_letter SET payload = ''",
        "UPDATE outbox.operation SET asked_by = 'somebody else'",
        "UPDATE outbox.operation SET asked_at = now()",
        "DELETE FROM outbox.operation",
        "DELETE FROM inbox.receipt",
        "SELECT checkpoint FROM inbox.job",
        "CALL outbox.maintain()",
        "SET ROLE pillarbox_owner",
    ],
    "application": [
        "SELECT payload FROM outbox.message",
        "SELECT count(*) FROM outbox.message",
        "UPDATE outbox.message SET published_at = now()",
        "DELETE FROM outbox.message",
        "INSERT INTO outbox.message (id, lane, topic, content_type, payload,"
        " published_at) VALUES (outbox.uuid7(), 0, 't', 'c', '', now())",
        "SELECT * FROM outbox.dead_letter",
        "SELECT nextval('inbox.delivery_seq')",
        "CALL outbox.maintain()",
        "CREATE TABLE outbox.mine (id int)",
        "SELECT headers FROM outbox.message",
        "COPY outbox.message TO STDOUT",
        "INSERT INTO outbox.message (id, lane, topic, content_type, payload)"
        " VALUES (outbox.uuid7(), 0, 't', 'c', '') RETURNING payload",
        "TRUNCATE outbox.message",
        "SELECT setval('outbox.message_seq', 1)",
        "ALTER TABLE outbox.message DISABLE TRIGGER message_doorbell",
        "TABLE inbox.receipt",
        "TABLE inbox.delivery",
        "SELECT * FROM outbox.upkeep_plan()",
        "UPDATE outbox.partition_policy SET retention = '99 days'",
        "SET ROLE pillarbox_owner",
        "SET ROLE pillarbox_relay",
    ],
    "relay": [
        ADD,
        "INSERT INTO outbox.message (id, lane, topic, content_type, payload)"
        " VALUES (outbox.uuid7(), 0, 't', 'c', '')",
        "SELECT nextval('outbox.message_seq')",
        "UPDATE outbox.message SET topic = 'other'",
        "DELETE FROM outbox.dead_letter",
        *(query.format(schema="outbox") for query in REWRITE_DEAD_LETTERS),
        "DELETE FROM inbox.delivery",
        "INSERT INTO inbox.subscription (consumer, topic) VALUES ('a', 't')",
        RECEIVE,
        "CALL outbox.maintain()",
        "SELECT outbox.make_partitions('outbox.message')",
        "UPDATE outbox.partition_policy SET unsettled = NULL",
        "TABLE partman.part_config",
        "SET ROLE pillarbox_owner",
        "UPDATE outbox.message SET payload = ''",
        "UPDATE outbox.message SET seq = 1",
        "DELETE FROM outbox.message",
        "TRUNCATE outbox.message",
        "UPDATE inbox.delivery SET acked_at = now()",
        "SELECT payload FROM inbox.delivery",
        "SELECT * FROM inbox.receipt",
    ],
    "consumer": [
        ADD,
        "SELECT * FROM outbox.message",
        "DELETE FROM inbox.receipt",
        "UPDATE inbox.receipt SET consumer = 'other'",
        DELIVER,
        "DELETE FROM inbox.delivery",
        "UPDATE inbox.delivery SET payload = ''",
        "UPDATE inbox.delivery SET consumer = 'mine'",
        "UPDATE outbox.message SET published_at = now()",
        "SELECT nextval('outbox.message_seq')",
        "SELECT * FROM outbox.dead_letter",
        GIVE_UP.format(schema="outbox"),
        "DELETE FROM inbox.dead_letter",
        *(query.format(schema="inbox") for query in REWRITE_DEAD_LETTERS),
        "TRUNCATE inbox.receipt",
        "UPDATE inbox.suspect SET consumer = 'other'",
        "SELECT outbox.trim_foreign_receipts_batch()",
        "CALL outbox.maintain()",
        "SET ROLE pillarbox_owner",
    ],
    "maintainer": [
        ADD,
        "SELECT * FROM outbox.message",
        "DELETE FROM outbox.message",
        "UPDATE outbox.partition_policy SET retention = '1 day'",
        "SELECT outbox.adopt_table('outbox.message')",
        "DROP TABLE outbox.message",
        "SET ROLE pillarbox_detacher",
        "SET ROLE pillarbox_owner",
        "SELECT outbox.schedule_detaches()",
        "UPDATE outbox.upkeep SET succeeded_at = now()",
        "UPDATE outbox.partition_policy SET archive = 'mine.archive'",
        "DELETE FROM outbox.dropped_partition",
        "INSERT INTO outbox.kept_partition SELECT 'inbox.message', 'outbox.x',"
        " now(), now()",
        "INSERT INTO outbox.retiring_partition SELECT 'inbox.message', 'outbox.x',"
        " now(), now()",
        "SELECT payload FROM inbox.delivery",
        "TABLE inbox.dead_letter",
        "DELETE FROM inbox.receipt",
        "DELETE FROM inbox.foreign_receipt",
        "UPDATE partman.part_config SET retention = '1 day'",
        "CREATE TABLE outbox.mine (id int)",
    ],
    # Only the owner.
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
        "SELECT payload FROM outbox.message",
        "SELECT headers FROM outbox.message",
        "SELECT payload FROM outbox.dead_letter",
        "SELECT error_stacktrace FROM inbox.dead_letter",
        "SELECT payload_json FROM outbox.readable_dead_letter",
        "SELECT topic FROM inbox.readable_dead_letter",
        "UPDATE outbox.message SET published_at = now()",
        "UPDATE partman.part_config SET retention = '1 day'",
        "SELECT outbox.finish_detached('outbox.message')",
        "SELECT outbox.note_success()",
        "SELECT outbox.accept_clock()",
        ADD,
        "SELECT payload FROM inbox.delivery",
        "SELECT headers FROM inbox.dead_letter",
        "SELECT error_stacktrace FROM outbox.dead_letter",
        "UPDATE outbox.dead_letter SET status = 'DISCARDED'",
        "UPDATE inbox.delivery SET acked_at = now()",
        "UPDATE outbox.partition_policy SET retention = '99 days'",
        "DELETE FROM inbox.receipt",
        RECEIVE,
        DELIVER,
        GIVE_UP.format(schema="outbox"),
        "INSERT INTO inbox.subscription (consumer, topic) VALUES ('a', 't')",
        "CALL outbox.maintain()",
    ],
}
ON_A_PARTITION = [
    "SELECT FROM {partition}",
    "INSERT INTO {partition} DEFAULT VALUES",
    "UPDATE {partition} SET {control} = now()",
    "DELETE FROM {partition}",
    "TRUNCATE {partition}",
    "DROP TABLE {partition}",
    "ALTER TABLE {parent} DETACH PARTITION {partition}",
    "ALTER TABLE {partition} SET (fillfactor = 50)",
]
DETACH = [
    "CREATE TABLE outbox.leaving PARTITION OF outbox.message"
    " FOR VALUES FROM ('2001-01-01') TO ('2001-01-02')",
    "ALTER TABLE outbox.message DETACH PARTITION outbox.leaving CONCURRENTLY",
    "DROP TABLE outbox.leaving",
]
