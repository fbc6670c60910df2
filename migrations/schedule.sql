-- Administrator part, run at the end of every migration and safe to repeat: pg_cron plans the
-- detaches every hour, as the detacher, and then runs the upkeep, as the maintainer.
DO $schedule$
DECLARE
    v_database text := current_setting('cron.database_name', true);
BEGIN
    IF v_database IS NULL THEN
        RAISE EXCEPTION 'pg_cron is not loaded by this server'
            USING HINT = format('install it (on Debian: apt install postgresql-%s-cron), set shared_preload_libraries = ''pg_cron'' and'
                ' cron.database_name = ''%s'' and restart, or migrate with --without-cron and run pillarbox maintain hourly',
                current_setting('server_version_num')::int / 10000, current_database());
    END IF;
    IF v_database <> current_database() THEN
        RAISE EXCEPTION 'pg_cron runs in database "%", this is "%"', v_database, current_database()
            USING HINT = format('set cron.database_name = ''%s'' and restart, or migrate with --without-cron and run in database "%s":'
                ' CREATE EXTENSION IF NOT EXISTS pg_cron; SELECT cron.schedule_in_database(''pillarbox upkeep'', ''7 * * * *'', ''CALL outbox.maintain()'', %L, %L)',
                current_database(), v_database, current_database(), {maintainer_name});
    END IF;
    BEGIN
        CREATE EXTENSION IF NOT EXISTS pg_cron;
        GRANT USAGE ON SCHEMA cron TO {maintainer}, {detacher};
    EXCEPTION WHEN insufficient_privilege THEN
        RAISE EXCEPTION 'role "%" may not install pg_cron or grant its use', current_user
            USING HINT = format('let an administrator run: CREATE EXTENSION pg_cron; GRANT USAGE ON SCHEMA cron TO %I, %I', {maintainer_name}, {detacher_name});
    END;
    EXECUTE format('ALTER ROLE {maintainer} IN DATABASE %I SET timezone = ''UTC''', current_database());
    -- A job starts outside our routines: it must not use objects of other schemas.
    EXECUTE format('ALTER ROLE {maintainer} IN DATABASE %I SET search_path = pg_catalog, pg_temp', current_database());
    EXECUTE format('ALTER ROLE {detacher} IN DATABASE %I SET search_path = pg_catalog, pg_temp', current_database());
    -- While a job waits, the launcher of pg_cron 1.4 with background workers starts no others. The next
    -- run finalizes a detach that was canceled.
    EXECUTE format('ALTER ROLE {detacher} IN DATABASE %I SET statement_timeout = ''2min''', current_database());
    -- cron.schedule() records the current user as the job's role, and replaces a job of the same name.
    SET LOCAL ROLE {maintainer};
    PERFORM cron.schedule('pillarbox upkeep', '7 * * * *', 'CALL outbox.maintain(patience => ''6 hours'')');
    PERFORM cron.schedule('pillarbox trim cron log', '23 3 * * *',
        'DELETE FROM cron.job_run_details WHERE username = current_user AND start_time < now() - interval ''14 days''');
    SET LOCAL ROLE {detacher};
    PERFORM cron.schedule('pillarbox plan detaches', '2 * * * *', 'SELECT outbox.schedule_detaches()');
    RESET ROLE;
END
$schedule$;
