-- Owner part, repeated at the end of every migration: who may do what. What an earlier version
-- granted is revoked first, in the same transaction.

SET LOCAL ROLE {owner};
{revoke_all};
REVOKE ALL
    ON FUNCTION
        outbox.set_interval(text, interval, integer),
        outbox.adopt_table(text),
        outbox.make_partitions(text),
        outbox.make_partition(text, timestamptz),
        outbox.keep_forgotten(text),
        outbox.make_days(),
        outbox.trim_foreign_receipts_batch(),
        outbox.detach_expired(text, regclass[], interval),
        outbox.upkeep_plan(text),
        outbox.finish_detached(text),
        outbox.describe_unsettled(text, regclass, timestamptz, timestamptz),
        outbox.unsettled_messages(regclass, timestamptz, timestamptz, integer),
        outbox.is_followed(text, timestamptz, timestamptz),
        outbox.schedule_detaches(),
        outbox.trim_cron_log(),
        outbox.note_failure(text, text, text, text, text, text),
        outbox.in_the_way(text, text, text, text, text),
        outbox.upkeep_step(text, text, regclass[], interval, integer, integer, boolean),
        outbox.end_upkeep(timestamptz, boolean),
        outbox.accept_clock()
    FROM PUBLIC;
REVOKE ALL ON PROCEDURE outbox.maintain(integer, interval, timestamptz) FROM PUBLIC;
GRANT EXECUTE
    ON FUNCTION
        outbox.make_partitions(text),
        outbox.trim_foreign_receipts_batch(),
        outbox.detach_expired(text, regclass[], interval),
        outbox.upkeep_plan(text),
        outbox.finish_detached(text),
        outbox.note_failure(text, text, text, text, text, text),
        outbox.upkeep_step(text, text, regclass[], interval, integer, integer, boolean),
        outbox.end_upkeep(timestamptz, boolean),
        outbox.trim_cron_log(),
        outbox.accept_clock()
    TO {maintainer};
GRANT EXECUTE ON PROCEDURE outbox.maintain(integer, interval, timestamptz) TO {maintainer};
GRANT EXECUTE ON FUNCTION outbox.upkeep_plan(text) TO {monitor}, {relay}, {consumer};
GRANT EXECUTE ON FUNCTION outbox.make_days() TO {relay}, {consumer};
GRANT EXECUTE
    ON FUNCTION outbox.is_followed(text, timestamptz, timestamptz)
    TO {maintainer}, {monitor}, {relay}, {consumer};
GRANT SELECT
    ON outbox.partition_policy
    TO {maintainer}, {monitor}, {application}, {relay}, {consumer};
GRANT SELECT
    ON TABLE
        outbox.partition_health,
        outbox.upkeep,
        outbox.upkeep_failure
    TO {maintainer}, {monitor}, {relay}, {consumer};
GRANT SELECT
    ON TABLE
        outbox.retiring_partition,
        outbox.dropped_partition,
        outbox.kept_partition
    TO {maintainer}, {monitor};
-- The detacher already has this as a member of the owner. Granted to the role itself, it keeps the
-- role from being dropped while this database needs it.
GRANT USAGE ON SCHEMA outbox TO {detacher};

RESET ROLE;
