-- Does:  Find out whether pg_cron runs its jobs in this database.
-- Takes: nothing
-- Gives: true or false
-- Index: none
-- A role that may not read the setting assumes it: pg_cron can't be installed elsewhere.
SELECT to_regclass('cron.job') IS NOT NULL
       AND CASE WHEN pg_has_role(current_user, 'pg_read_all_settings', 'USAGE')
                THEN current_setting('cron.database_name', true) IS NOT DISTINCT FROM current_database() ELSE true END
