"""Ways to break a database, and what the doctor reports about each of them.

Each name maps to the statement that breaks something, the check that finds it, the
severity, and parts of the finding and of its remedy.
"""

from tests.fixtures.days import make_partitions_at

IN_DAYS = (
    "(SELECT partition::text FROM outbox.partitions('{}')"
    " WHERE starts_at = date_trunc('day', now(), 'UTC') + {} * interval '24 hours')"
)
# Replaces the catalog view that a check reads with a fake, in this database only.
SEEN = (
    "SET allow_system_table_mods = on;"
    " ALTER VIEW pg_catalog.{0} RENAME TO {0}_itself;"
    " CREATE VIEW pg_catalog.{0} AS {1}; GRANT SELECT ON pg_catalog.{0} TO PUBLIC"
)
FAR_BEHIND = "the reader of a replication slot is far behind"
BROKEN = {
    "pg_partman is gone": (
        "DROP EXTENSION pg_partman CASCADE",
        *(
            "extensions",
            "error",
            "is not installed: the upkeep",
            "pillarbox migrate",
        ),
    ),
    "a limit of the table was never validated": (
        "UPDATE pg_constraint SET convalidated = false WHERE conname = 'key_size'"
        " AND conrelid = 'outbox.message'::regclass",
        *("schema", "warning", "not validated the constraint key_size", "migrate"),
    ),
    "a partition is half detached": (
        "UPDATE pg_inherits SET inhdetachpending = true"
        f" WHERE inhrelid = {IN_DAYS.format('outbox.message', 3)}::regclass",
        *("partitions", "error", "its detach was interrupted", "FINALIZE"),
    ),
    "part of the schema is missing": (
        "DROP VIEW outbox.partition_health",
        *(
            "partitions",
            "error",
            "part of the schema is missing",
            "from pillarbox migrate --sql",
        ),
    ),
    FAR_BEHIND: (
        SEEN.format(
            "pg_replication_slots",
            "SELECT 'slow'::name AS slot_name, true AS active, NULL::xid AS xmin,"
            " NULL::int AS active_pid, 'physical' AS slot_type, NULL::name AS plugin,"
            " NULL::name AS database, NULL::pg_lsn AS restart_lsn,"
            " ((pg_current_xact_id()::text::bigint + 4292967296) % 4294967296)::text"
            "::xid AS catalog_xmin",
        ),
        *(
            "pins",
            "warning",
            "replication slot slow",
            "FROM pg_stat_replication",
        ),
    ),
    "pg_partman is older than we can use": (
        "UPDATE pg_extension SET extversion = '4.6.2' WHERE extname = 'pg_partman'",
        *("extensions", "error", "is older than 4.7", "ALTER EXTENSION"),
    ),
    "the grants on pg_partman are lost": (
        "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA partman FROM pillarbox_owner, public",
        *("grants", "error", "lacks privileges on pg_partman", "pillarbox migrate"),
    ),
    "today has no partition": (
        "DO $$ BEGIN EXECUTE 'DROP TABLE ' ||"
        f" {IN_DAYS.format('inbox.dead_letter', 0)}; END $$",
        *("partitions", "error", "rows are refused", "outbox.make_partitions"),
    ),
    "a day ahead is missing": (
        "DO $$ BEGIN EXECUTE 'DROP TABLE ' ||"
        f" {IN_DAYS.format('inbox.suspect', 2)}; END $$",
        *("partitions", "warning", "lacks 1 partition,", "outbox.make_partitions"),
    ),
    "there is a DEFAULT partition": (
        "SET ROLE pillarbox_owner; CREATE TABLE outbox.message_default"
        " PARTITION OF outbox.message DEFAULT",
        *("partitions", "error", "it is a DEFAULT partition", "then rename it"),
    ),
    "a partition belongs to another role": (
        "DO $$ BEGIN EXECUTE 'ALTER TABLE ' ||"
        f" {IN_DAYS.format('outbox.message', 2)} ||"
        " ' OWNER TO pillarbox_maintainer'; END $$",
        *("partitions", "error", "it belongs to pillarbox_m", "OWNER TO"),
    ),
    "a partition begins in another time zone": (
        "SET ROLE pillarbox_owner; CREATE TABLE outbox.message_odd PARTITION OF"
        " outbox.message FOR VALUES FROM ('2040-01-01 05:00+00')"
        " TO ('2040-01-02 05:00+00')",
        *("partitions", "error", "not whole hours, days or", "DETACH PARTITION"),
    ),
    "a partition has no begin": (
        "SET ROLE pillarbox_owner; CREATE TABLE outbox.message_past PARTITION OF"
        " outbox.message FOR VALUES FROM (MINVALUE) TO ('2020-01-02 00:00+00')",
        *("partitions", "error", "it covers MINVALUE to 2020", "DETACH PARTITION"),
    ),
    "receipts are dropped too soon": (
        "UPDATE outbox.partition_policy SET retention = '2 days', minimum = '2 days'"
        " WHERE parent_table = 'inbox.receipt'",
        *("retention", "warning", "can arrive up to", "pillarbox retention set"),
    ),
    "jobs are dropped too soon": (
        "UPDATE outbox.partition_policy SET retention = '2 days', minimum = '2 days'"
        " WHERE parent_table = 'inbox.job'",
        *("retention", "warning", "inbox.job is kept for", "set inbox.job 14d"),
    ),
    "no relay runs": (
        "INSERT INTO outbox.message (id, created_at, lane, topic, content_type,"
        " payload) VALUES (outbox.uuid7(), now(), 0, 't', 'c', '');"
        # Two hours ago might have been yesterday.
        " SET ROLE pillarbox_owner;"
        + make_partitions_at(
            "outbox.message", "ARRAY[now() - interval '2 hours']"
        ).decode()
        + "; RESET ROLE;"
        " UPDATE outbox.message SET available_at = now() - interval '1 hour',"
        " created_at = now() - interval '2 hours'",
        *("backlog", "error", "no relay is running, and", "pillarbox relay"),
    ),
    "a replication slot has no reader": (
        "SELECT pg_create_physical_replication_slot('forgotten_' || pg_backend_pid())",
        *("pins", "warning", "the replication slot forgotten_", "find its owner"),
    ),
}
TOGETHER = {
    "pg_partman": ["pg_partman is gone"],
    "what a migration restores": [
        "a limit of the table was never validated",
        "the grants on pg_partman are lost",
    ],
    "partitions and policies": [
        *("a partition is half detached", "today has no partition"),
        *("a day ahead is missing", "a partition belongs to another role"),
        *("receipts are dropped too soon", "jobs are dropped too soon"),
    ],
}
"""Problems that the remedies repair, all of a group in one database."""
OTHERWISE = {
    "partitions of others": [
        *("there is a DEFAULT partition", "a partition begins in another time zone"),
        *("a partition has no begin", "no relay runs"),
        *("a replication slot has no reader", "pg_partman is older than we can use"),
    ],
    "fakes": [FAR_BEHIND],
    "objects": ["part of the schema is missing"],
}
"""The other ones: fakes can't be repaired, and a person has to restore objects that
were dropped, and to decide what becomes of slots and partitions that pillarbox didn't
create."""
