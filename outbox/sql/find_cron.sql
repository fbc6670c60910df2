-- Does:  Find out where pg_cron runs its jobs.
-- Takes: nothing
-- Gives: whether it is installed here, its database (null: not loaded), this database
-- Index: none
-- A role that may not read the setting assumes this database: pg_cron can't be installed elsewhere.
SELECT to_regclass('cron.job') IS NOT NULL,
       CASE WHEN pg_has_role(current_user, 'pg_read_all_settings', 'USAGE')
            THEN current_setting('cron.database_name', true)
            ELSE current_database() END,
       current_database()
