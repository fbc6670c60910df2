-- Administrator part: removes the jobs, since a job whose role is dropped stops the pg_cron launcher of the whole
-- server (seen with 1.4.2, 1.6.5 and 1.6.8).

DO $schedule$
DECLARE
    v_role text;
BEGIN
    IF to_regclass('outbox.alembic_version') IS NULL THEN
        RAISE EXCEPTION 'database % has no pillarbox schema', current_database()
            USING HINT = 'there is nothing to remove';
    END IF;
    FOREACH v_role IN ARRAY ARRAY[{maintainer_name}, {detacher_name}] LOOP
        CONTINUE WHEN NOT EXISTS (SELECT FROM pg_roles r WHERE r.rolname = v_role);
        IF EXISTS (SELECT FROM pg_extension WHERE extname = 'pg_cron') AND has_schema_privilege(v_role, 'cron', 'USAGE') THEN
            SET LOCAL row_security = on;  -- pg_cron's policies show each role its own jobs
            EXECUTE format('SET LOCAL ROLE %I', v_role);
            PERFORM cron.unschedule(jobid) FROM cron.job WHERE username = v_role AND jobname LIKE 'pillarbox %';
            RESET ROLE;
        END IF;
        EXECUTE format('ALTER ROLE %I IN DATABASE %I RESET ALL', v_role, current_database());
    END LOOP;
END
$schedule$;
