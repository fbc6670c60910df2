-- Administrator part, run at the end of every migration and safe to repeat: pg_cron plans the
-- detaches every hour, as the detacher, and then runs the upkeep, as the maintainer.
DO $schedule$
DECLARE
    -- Databases can share the table of jobs, whose names have at most 63 bytes.
    v_of text := ' of ' || CASE WHEN octet_length(current_database()) > 36 THEN left(md5(current_database()), 8) ELSE current_database() END;
    -- Background workers need no address.
    v_heeds_nodes boolean := coalesce(current_setting('cron.use_background_workers', true) = 'off', false);
    v_role text;
BEGIN
    BEGIN
        GRANT USAGE ON SCHEMA cron TO {maintainer}, {detacher};
    EXCEPTION WHEN insufficient_privilege THEN
        RAISE EXCEPTION 'role "%" may not grant the use of pg_cron', current_user
            USING HINT = format('let an administrator run: GRANT USAGE ON SCHEMA cron TO %I, %I; or add --without-cron', {maintainer_name}, {detacher_name});
    END;
    EXECUTE format('ALTER ROLE {maintainer} IN DATABASE %I SET timezone = ''UTC''', current_database());
    -- A job starts outside pillarbox's routines: it must not use objects of other schemas.
    EXECUTE format('ALTER ROLE {maintainer} IN DATABASE %I SET search_path = pg_catalog, pg_temp', current_database());
    EXECUTE format('ALTER ROLE {detacher} IN DATABASE %I SET search_path = pg_catalog, pg_temp', current_database());
    -- While a job waits, the launcher of pg_cron 1.4 with background workers starts no others. The next
    -- run finalizes a detach that was canceled.
    EXECUTE format('ALTER ROLE {detacher} IN DATABASE %I SET statement_timeout = ''2min''', current_database());
    -- It would end the whole upkeep; each step has its own limit.
    EXECUTE format('ALTER ROLE {maintainer} IN DATABASE %I SET statement_timeout = 0', current_database());
    -- Renaming the database leaves its jobs with the old name, and a dump takes them to other servers. Jobs
    -- of other databases that exist may be theirs; the doctor reports them.
    SET LOCAL row_security = on;  -- pg_cron's policies show each role its own jobs
    FOREACH v_role IN ARRAY ARRAY[{maintainer_name}, {detacher_name}] LOOP
        EXECUTE format('SET LOCAL ROLE %I', v_role);
        PERFORM cron.unschedule(j.jobid)
           FROM cron.job j
          CROSS JOIN LATERAL (
                SELECT NOT v_heeds_nodes
                    OR j.nodeport = current_setting('port')::int
                       AND (j.nodename IN ('', 'localhost', '127.0.0.1', '::1') OR j.nodename LIKE '/%')) AS node (is_this)
          WHERE j.username = v_role AND j.jobname LIKE 'pillarbox %'
                AND CASE WHEN j.database = current_database()
                         THEN NOT node.is_this
                              OR j.jobname NOT LIKE 'pillarbox detach %'
                                 AND j.jobname NOT IN ('pillarbox upkeep' || v_of, 'pillarbox trim cron log' || v_of, 'pillarbox plan detaches' || v_of)
                         ELSE node.is_this AND NOT EXISTS (SELECT FROM pg_database d WHERE d.datname = j.database) END;
    END LOOP;
    -- cron.schedule() records the current user as the job's role, and replaces a job of the same name.
    SET LOCAL ROLE {maintainer};
    PERFORM cron.schedule('pillarbox upkeep' || v_of, '7 * * * *', 'CALL outbox.maintain()');
    PERFORM cron.schedule('pillarbox trim cron log' || v_of, '23 3 * * *', 'SELECT outbox.trim_cron_log()');
    SET LOCAL ROLE {detacher};
    PERFORM cron.schedule('pillarbox plan detaches' || v_of, '2 * * * *', 'SELECT outbox.schedule_detaches()');
    RESET ROLE;
END
$schedule$;
