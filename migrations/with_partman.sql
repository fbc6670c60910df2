-- Owner part, run in every migration with pg_partman and safe to repeat: it creates the partitions from
-- now on, and takes over existing ones, whatever created them.

-- Not with pg_partman's create_parent(), which can't take over partitions that were restored from a dump, and in 4.x
-- creates a DEFAULT partition, which prevents DETACH CONCURRENTLY. pg_partman's own retention is off: pillarbox
-- uses outbox.finish_detached(). If somebody turns it on, retention_keep_table makes pg_partman detach partitions
-- that it would otherwise drop with unsettled rows. Nor with run_maintenance(): 4.7 creates one more after noon,
-- 5.0 creates none for an empty table, and no version fills gaps.
CREATE OR REPLACE FUNCTION outbox.make_with_partman(parent text, missing timestamptz[]) RETURNS void
LANGUAGE plpgsql {pinned}
AS $body$
BEGIN
    INSERT INTO {partman}.part_config (parent_table, control, partition_type, partition_interval)
    SELECT p.parent_table, p.control, CASE WHEN e.extversion LIKE '4.%' THEN 'native' ELSE 'range' END, p.span::text
      FROM outbox.partition_policy p JOIN pg_extension e ON e.extname = 'pg_partman'
     WHERE p.parent_table = parent
        ON CONFLICT DO NOTHING;
    UPDATE {partman}.part_config c
       SET control = p.control, epoch = 'none', partition_interval = p.span::text, premake = p.premake,
           datetime_string = outbox.name_format(p.span), template_table = p.template,
           infinite_time_partitions = true, undo_in_progress = false, automatic_maintenance = 'off',
           retention = NULL, retention_schema = NULL, retention_keep_table = true, retention_keep_index = true,
           constraint_cols = NULL, inherit_privileges = false, ignore_default_data = true, jobmon = false
      FROM outbox.partition_policy p
     WHERE c.parent_table = parent AND p.parent_table = parent;
    IF missing IS NOT NULL THEN
        PERFORM {partman}.create_partition_time(p_parent_table := parent, p_partition_times := missing);
    END IF;
END
$body$;
COMMENT ON FUNCTION outbox.make_with_partman IS
    'let pg_partman create these partitions, with the settings of the policy; it exists if the last migration was with pg_partman';

SELECT outbox.make_with_partman(p.parent_table, NULL) FROM outbox.partition_policy p;
