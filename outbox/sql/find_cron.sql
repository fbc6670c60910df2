-- Does:  Tell where pg_cron works.
-- Takes: nothing
-- Gives: installed here?, its database (null: not loaded), this database
-- Index: none
-- Who may not read the setting takes it for this database: elsewhere it can't be installed.
SELECT to_regclass('cron.job') IS NOT NULL,
       CASE WHEN pg_has_role(current_user, 'pg_read_all_settings', 'USAGE')
            THEN current_setting('cron.database_name', true)
            ELSE current_database() END,
       current_database()
