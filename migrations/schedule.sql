-- Administrator part, run at the end of every migration and safe to repeat: pg_cron plans the
-- detaches every hour, as the detacher, and then runs the upkeep, as the maintainer.
DO $schedule$
DECLARE
    v_role text;
    v_setting text;
BEGIN
    BEGIN
        GRANT USAGE ON SCHEMA cron TO {maintainer}, {detacher};
    EXCEPTION WHEN insufficient_privilege THEN
        RAISE EXCEPTION 'role "%" may not grant the use of pg_cron', current_user
            USING HINT = format('let an administrator run: GRANT USAGE ON SCHEMA cron TO %I, %I; or add --without-cron', {maintainer_name}, {detacher_name});
    END;
    FOR v_role, v_setting IN VALUES
        -- A job starts outside our routines: it must not use objects of other schemas.
        ({maintainer_name}, 'search_path = pg_catalog, pg_temp'),
        ({detacher_name}, 'search_path = pg_catalog, pg_temp'),
        ({maintainer_name}, 'timezone = ''UTC'''),
        -- It would end the whole upkeep, whose steps have limits of their own.
        ({maintainer_name}, 'statement_timeout = 0'),
        -- While a job waits, the launcher of pg_cron 1.4 with background workers starts no others. The next
        -- run finalizes a detach that was canceled.
        ({detacher_name}, 'statement_timeout = ''2min''')
    LOOP
        EXECUTE format('ALTER ROLE %I IN DATABASE %I SET %s', v_role, current_database(), v_setting);
    END LOOP;
    SET LOCAL row_security = on;  -- pg_cron's policies show each role its own jobs
    FOREACH v_role IN ARRAY ARRAY[{maintainer_name}, {detacher_name}] LOOP
        EXECUTE format('SET LOCAL ROLE %I', v_role);
        -- Renaming the database leaves its jobs with the old name, and a dump brings those of another server.
        PERFORM cron.unschedule(j.jobid) FROM cron.job j
          WHERE j.username = v_role AND j.jobname LIKE 'pillarbox %'
            AND (NOT EXISTS (SELECT FROM pg_database d WHERE d.datname = j.database)
                 OR j.nodeport <> current_setting('port')::int);
    END LOOP;
    -- cron.schedule() records the current user as the job's role, and replaces a job of the same name.
    SET LOCAL ROLE {maintainer};
    PERFORM cron.schedule('pillarbox upkeep', '7 * * * *', 'CALL outbox.maintain()');
    SET LOCAL ROLE {detacher};
    PERFORM cron.schedule('pillarbox plan detaches', '2 * * * *', 'SELECT outbox.schedule_detaches()');
    RESET ROLE;
END
$schedule$;
