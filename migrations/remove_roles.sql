-- Administrator part: drops the roles, except, with a notice, any that still owns objects or has privileges elsewhere.

-- A pg_cron job without its role stops the launcher of the whole server, and jobs that were scheduled from another
-- database can't be seen here: so the two roles that may have jobs are kept wherever pg_cron is loaded.
DO $roles$
DECLARE
    v_role text;
    v_has_cron boolean := EXISTS (SELECT FROM pg_extension WHERE extname = 'pg_cron');
BEGIN
    IF v_has_cron THEN
        REVOKE USAGE ON SCHEMA cron FROM {maintainer}, {detacher};
    END IF;
    BEGIN
        v_has_cron := current_setting('cron.database_name', true) IS NOT NULL;
    EXCEPTION WHEN insufficient_privilege THEN
        v_has_cron := true;
    END;
    FOREACH v_role IN ARRAY ARRAY[{web_name}, {monitor_name}, {consumer_name}, {operator_name}, {reader_name}, {relay_name}, {application_name}, {detacher_name}, {maintainer_name}, {owner_name}] LOOP
        BEGIN
            EXECUTE format('DROP ROLE IF EXISTS %I', v_role);
            IF v_has_cron AND v_role IN ({detacher_name}, {maintainer_name}) THEN
                RAISE object_in_use;  -- which undoes the DROP
            END IF;
        EXCEPTION
            WHEN dependent_objects_still_exist OR insufficient_privilege THEN
                RAISE NOTICE 'role "%" is kept: %', v_role, SQLERRM;
            WHEN object_in_use THEN
                RAISE WARNING 'role "%" is kept: it may own pg_cron jobs, and a job without its role stops pg_cron for the whole server', v_role
                    USING HINT = format('in the database of pg_cron, run: SELECT cron.unschedule(jobid) FROM cron.job WHERE username = %L; DROP ROLE %I;', v_role, v_role);
        END;
    END LOOP;
END
$roles$;
