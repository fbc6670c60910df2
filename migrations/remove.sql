-- Administrator part: removes pillarbox's objects, with all data. Keeps the extensions, which others may use.

SET LOCAL ROLE {owner};

-- Only this table records which detached partitions there are.
DO $detached$
DECLARE
    v_partition text;
BEGIN
    PERFORM outbox.finish_detached(p.parent_table) FROM (SELECT q.* FROM outbox.partition_policy q ORDER BY q.follows NULLS FIRST) p;
    SELECT r.partition INTO v_partition
      FROM outbox.retiring_partition r JOIN pg_class c ON c.oid = to_regclass(r.partition)
     WHERE NOT c.relispartition;
    IF FOUND THEN
        RAISE EXCEPTION 'partition % is detached, but still in use', v_partition
            USING HINT = 'run pillarbox maintain until it is gone, then retry';
    END IF;
    SELECT k.partition INTO v_partition FROM outbox.kept_partition k WHERE to_regclass(k.partition) IS NOT NULL;
    IF FOUND THEN
        RAISE EXCEPTION 'partition % is kept by the policy: move it out of here, or drop it', v_partition
            USING HINT = format('for example: ALTER TABLE %s SET SCHEMA public', v_partition);
    END IF;
END
$detached$;

EXECUTE EACH
SELECT format('DELETE FROM %s c USING outbox.partition_policy p WHERE c.parent_table = p.parent_table', c.oid::regclass)
  FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
  JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = 'part_config'
 WHERE e.extname = 'pg_partman' AND n.nspname = {partman_name} AND has_table_privilege(c.oid, 'DELETE');

-- CASCADE must not drop objects that aren't pillarbox's.
DO $others$
DECLARE
    v_object text;
BEGIN
    SELECT pg_describe_object(o.classid, o.objid, o.objsubid) INTO v_object
      FROM (SELECT d.classid, d.objid, d.objsubid FROM pg_depend d
             WHERE d.deptype = 'n'
               AND (EXISTS (SELECT FROM pg_class c WHERE d.refclassid = 'pg_class'::regclass AND c.oid = d.refobjid AND c.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace))
                 OR EXISTS (SELECT FROM pg_proc f WHERE d.refclassid = 'pg_proc'::regclass AND f.oid = d.refobjid AND f.pronamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace))
                 OR EXISTS (SELECT FROM pg_type t WHERE d.refclassid = 'pg_type'::regclass AND t.oid = d.refobjid AND t.typnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)))
               AND (pg_identify_object_as_address(d.classid, d.objid, d.objsubid)).object_names[1] NOT IN ('outbox', 'inbox')
             UNION ALL
            SELECT 'pg_class'::regclass, c.oid, 0 FROM pg_class c
             WHERE c.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND c.relowner <> {owner_name}::regrole AND c.relkind <> 'i'
             UNION ALL
            SELECT 'pg_proc'::regclass, f.oid, 0 FROM pg_proc f
             WHERE f.pronamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND f.proowner <> {owner_name}::regrole) AS o
     LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% isn''t an object of pillarbox, but would be dropped with it', v_object
            USING HINT = 'drop it yourself, or move it to another schema';
    END IF;
END
$others$;

RESET ROLE;

DROP SCHEMA inbox, outbox CASCADE;
