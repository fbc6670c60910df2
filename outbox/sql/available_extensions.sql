-- Does:  Find out which extensions a migration of this database can use.
-- Takes: nothing
-- Gives: whether the server has pg_partman, whether pg_cron runs its jobs in this database
-- Index: none
SELECT EXISTS (SELECT FROM pg_available_extensions a WHERE a.name = 'pg_partman'),
       coalesce(current_setting('cron.database_name', true) = current_database(), false)
