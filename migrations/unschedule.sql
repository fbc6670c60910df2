-- Administrator part. Jobs go before roles: a job whose role is gone stops the pg_cron
-- launcher for the whole server (seen with 1.4.2, 1.6.5 and 1.6.8).

DO $schedule$
BEGIN
    IF to_regclass('outbox.alembic_version') IS NULL THEN
        RAISE EXCEPTION 'database % has no schema outbox of ours', current_database()
            USING HINT = 'there is nothing to remove';
    END IF;
    IF to_regclass('cron.job') IS NOT NULL AND has_schema_privilege({maintainer_name}, 'cron', 'USAGE') THEN
        SET LOCAL ROLE {maintainer};
        PERFORM cron.unschedule(jobid) FROM cron.job WHERE jobname LIKE 'pillarbox %' AND database = current_database();
        RESET ROLE;
        EXECUTE 'REVOKE USAGE ON SCHEMA cron FROM {maintainer}';
    END IF;
    IF to_regclass('cron.job') IS NOT NULL AND has_schema_privilege({detacher_name}, 'cron', 'USAGE') THEN
        SET LOCAL ROLE {detacher};
        PERFORM cron.unschedule(jobid) FROM cron.job WHERE jobname LIKE 'pillarbox %' AND database = current_database();
        RESET ROLE;
        EXECUTE 'REVOKE USAGE ON SCHEMA cron FROM {detacher}';
    END IF;
    EXECUTE format('ALTER ROLE {maintainer} IN DATABASE %I RESET timezone', current_database());
    EXECUTE format('ALTER ROLE {maintainer} IN DATABASE %I RESET search_path', current_database());
    EXECUTE format('ALTER ROLE {detacher} IN DATABASE %I RESET search_path', current_database());
    EXECUTE format('ALTER ROLE {detacher} IN DATABASE %I RESET statement_timeout', current_database());
END
$schedule$;
