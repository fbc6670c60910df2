-- Does:  Count the launchers of pg_cron.
-- Takes: nothing
-- Gives: count
-- Index: none
-- Only pg_monitor sees the backend_type; every role sees the application_name.
SELECT count(*) FROM pg_stat_activity
 WHERE backend_type = 'pg_cron launcher' OR application_name = 'pg_cron scheduler'
