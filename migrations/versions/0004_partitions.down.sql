-- Owner part: drops the policy and the upkeep, and pg_partman's configuration.

SET LOCAL ROLE {owner};

-- Without the table that records them, detached partitions would be lost track of.
DO $detached$
DECLARE
    v_partition text;
BEGIN
    PERFORM outbox.finish_detached(p.parent_table) FROM (SELECT q.* FROM outbox.partition_policy q ORDER BY q.follows NULLS FIRST) p;
    SELECT r.partition INTO v_partition
      FROM outbox.retiring_partition r JOIN pg_class c ON c.oid = to_regclass(r.partition)
     WHERE NOT c.relispartition;
    IF FOUND THEN
        RAISE EXCEPTION 'partition % is detached and somebody uses it', v_partition
            USING HINT = 'run pillarbox maintain until it is gone, then this again';
    END IF;
    SELECT k.partition INTO v_partition FROM outbox.kept_partition k WHERE to_regclass(k.partition) IS NOT NULL;
    IF FOUND THEN
        RAISE EXCEPTION 'partition % is kept by the policy: move it out of here, or drop it', v_partition
            USING HINT = format('for example: ALTER TABLE %s SET SCHEMA public', v_partition);
    END IF;
END
$detached$;

DELETE FROM {partman}.part_config c USING outbox.partition_policy p WHERE c.parent_table = p.parent_table;
ALTER TABLE inbox.foreign_receipt ALTER COLUMN received_at SET DEFAULT now();
DROP VIEW outbox.partition_health;
DROP PROCEDURE outbox.maintain(integer, interval, timestamptz);
DROP FUNCTION outbox.trim_cron_log(), outbox.upkeep_step(text, text, regclass[], interval, integer, integer, boolean), outbox.end_upkeep(timestamptz, boolean),
    outbox.schedule_detaches(), outbox.detach_expired(text, regclass[], interval), outbox.finish_detached(text),
    outbox.upkeep_plan(text),
    outbox.show_unsettled(text, text, timestamptz, timestamptz),
    outbox.describe_unsettled(text, regclass, timestamptz, timestamptz),
    outbox.unsettled_messages(regclass, timestamptz, timestamptz, integer), outbox.is_followed(text, timestamptz, timestamptz),
    outbox.detach_under_way(), outbox.may_finalize(regclass),
    outbox.trim_foreign_receipts_batch(), outbox.receipt_time(), outbox.make_partitions(text),
    outbox.make_days(), outbox.make_partition(text, timestamptz),
    outbox.keep_forgotten(text), outbox.adopt_table(text),
    outbox.set_interval(text, interval, integer), outbox.missing_partitions(text), outbox.name_format(text, interval),
    outbox.begin_of(interval, timestamptz), outbox.partitions(text), outbox.clock_problem(),
    outbox.accept_clock(), outbox.note_failure(text, text, text, text, text, text), outbox.in_the_way(text, text, text, text, text), outbox.without_row(text, text);
DROP TABLE outbox.upkeep, outbox.upkeep_failure, outbox.dropped_partition, outbox.kept_partition, outbox.retiring_partition, outbox.partition_policy;
DROP FUNCTION outbox.follow_policy();
RESET ROLE;
