-- Administrator part: removes the jobs before their roles, since a job without its role stops the
-- pg_cron launcher of the whole server (seen with 1.4.2, 1.6.5 and 1.6.8).

DO $schedule$
DECLARE
    v_role text;
BEGIN
    IF to_regclass('outbox.alembic_version') IS NULL THEN
        RAISE EXCEPTION 'database % has no pillarbox schema', current_database()
            USING HINT = 'there is nothing to remove';
    END IF;
    IF EXISTS (SELECT FROM pg_extension WHERE extname = 'pg_cron') THEN
        SET LOCAL row_security = on;  -- pg_cron's policies show each role its own jobs
        FOREACH v_role IN ARRAY ARRAY[{maintainer_name}, {detacher_name}] LOOP
            -- The role sees its own jobs; without this privilege, only an administrator can have scheduled them.
            IF has_schema_privilege(v_role, 'cron', 'USAGE') THEN
                EXECUTE format('SET LOCAL ROLE %I', v_role);
            END IF;
            IF has_schema_privilege(current_user, 'cron', 'USAGE') THEN
                PERFORM cron.unschedule(jobid) FROM cron.job
                  WHERE jobname LIKE 'pillarbox %' AND username = v_role
                    AND (database = current_database() OR database NOT IN (SELECT datname FROM pg_database));
            END IF;
            RESET ROLE;
        END LOOP;
    END IF;
    EXECUTE format('ALTER ROLE {maintainer} IN DATABASE %I RESET ALL', current_database());
    EXECUTE format('ALTER ROLE {detacher} IN DATABASE %I RESET ALL', current_database());
END
$schedule$;
