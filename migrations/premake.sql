-- Owner part, run after a migration without pg_cron, and safe to repeat: even if nothing runs the
-- upkeep, rows are accepted for these days.

DO $premake$
DECLARE
    v_table record;
BEGIN
    FOR v_table IN SELECT p.parent_table AS name, p.span FROM outbox.partition_policy p
                    WHERE starts_with(p.parent_table, '{schema}.') ORDER BY p.follows NULLS FIRST, p.parent_table LOOP
        PERFORM pg_advisory_xact_lock(hashtextextended('outbox.make_partitions ' || v_table.name, 0));
        PERFORM outbox.make_partition(v_table.name, d)
           -- For hourly partitions, not thousands.
           FROM generate_series(outbox.begin_of(v_table.span, now()), now() + least(interval '{days} days', 100 * v_table.span), v_table.span) AS d
          WHERE NOT EXISTS (SELECT FROM outbox.partitions(v_table.name) x WHERE x.starts_at < d + v_table.span AND x.ends_at > d);
    END LOOP;
END
$premake$;
