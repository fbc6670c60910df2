-- Does:  Tell where pg_cron works.
-- Takes: nothing
-- Gives: installed here?, its database (null: not loaded), this database
-- Index: none
SELECT to_regclass('cron.job') IS NOT NULL,
       current_setting('cron.database_name', true), current_database()
