-- Administrator part: removes everything of ours, with all data. Keeps the extensions, which others
-- may use, and, with a notice, any role that still owns objects or has privileges elsewhere.

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

-- CASCADE must drop nothing of other people's.
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
        RAISE EXCEPTION '% is not one of our objects, but would be dropped with them', v_object
            USING HINT = 'drop it yourself, or move it to another schema';
    END IF;
END
$others$;

RESET ROLE;

DROP SCHEMA inbox, outbox CASCADE;

DO $grants$
DECLARE
    v_object record;
BEGIN
    FOR v_object IN
        SELECT d.classid = 'pg_class'::regclass AS is_table,
               CASE d.classid WHEN 'pg_class'::regclass THEN d.objid::regclass::text
                              ELSE d.objid::regprocedure::text END AS name
          FROM pg_extension e JOIN pg_depend d ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
          LEFT JOIN pg_class c ON c.oid = d.objid AND d.classid = 'pg_class'::regclass
         WHERE e.extname = 'pg_partman' AND d.deptype = 'e'
           AND (c.relkind IN ('r', 'p', 'v') OR d.classid = 'pg_proc'::regclass)
         ORDER BY name
    LOOP
        EXECUTE format(CASE WHEN v_object.is_table THEN 'REVOKE ALL ON TABLE %s FROM {owner}, {monitor}'
                            ELSE 'REVOKE ALL ON ROUTINE %s FROM {owner}' END, v_object.name);
    END LOOP;
END
$grants$;
REVOKE USAGE ON SCHEMA {partman} FROM {owner}, {monitor};

-- A pg_cron job without its role stops the launcher of the whole server, so a role is only dropped if
-- it certainly has no jobs. Jobs that were scheduled from another database can't be seen here.
DO $roles$
DECLARE
    v_role text;
    v_has_jobs boolean;
    v_installed boolean := EXISTS (SELECT FROM pg_extension WHERE extname = 'pg_cron');
    v_home text;
    v_elsewhere boolean;
BEGIN
    BEGIN
        v_home := current_setting('cron.database_name', true);
        v_elsewhere := v_home <> current_database();
    EXCEPTION WHEN insufficient_privilege THEN
        -- It is loaded, but only administrators can see in which database.
        v_elsewhere := NOT v_installed;
    END;
    FOREACH v_role IN ARRAY ARRAY[{web_name}, {monitor_name}, {consumer_name}, {relay_name}, {application_name}, {detacher_name}, {maintainer_name}, {owner_name}] LOOP
        v_has_jobs := v_role IN ({detacher_name}, {maintainer_name}) AND v_elsewhere;
        IF v_role IN ({detacher_name}, {maintainer_name}) AND v_installed THEN
            IF has_schema_privilege(v_role, 'cron', 'USAGE') THEN
                EXECUTE format('SET LOCAL ROLE %I', v_role);
                SET LOCAL row_security = on;
                v_has_jobs := v_has_jobs OR EXISTS (SELECT FROM cron.job WHERE username = current_user);
                RESET ROLE;
            ELSIF NOT has_schema_privilege(current_user, 'cron', 'USAGE') THEN
                v_has_jobs := true;
            ELSIF row_security_active('cron.job') THEN
                v_has_jobs := true;
            ELSE
                v_has_jobs := v_has_jobs OR EXISTS (SELECT FROM cron.job WHERE username = v_role);
            END IF;
            IF NOT v_has_jobs OR v_elsewhere THEN
                EXECUTE format('REVOKE USAGE ON SCHEMA cron FROM %I', v_role);
            END IF;
        END IF;
        BEGIN
            EXECUTE format('DROP ROLE IF EXISTS %I', v_role);
            IF v_has_jobs THEN
                RAISE object_in_use;  -- which undoes the DROP
            END IF;
        EXCEPTION
            WHEN dependent_objects_still_exist OR insufficient_privilege THEN
                RAISE NOTICE 'role "%" is kept: %', v_role, SQLERRM;
            WHEN object_in_use THEN
                RAISE WARNING 'role "%" is kept: it may own pg_cron jobs, and a job without its role stops pg_cron for the whole server', v_role
                    USING HINT = format('in %s, run: SELECT cron.unschedule(jobid) FROM cron.job WHERE username = %L; DROP ROLE %I;',
                                        coalesce(format('database "%s"', v_home), 'the database of pg_cron'), v_role, v_role);
        END;
    END LOOP;
END
$roles$;
