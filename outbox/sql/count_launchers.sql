-- Does:  Count the launchers of pg_cron.
-- Takes: nothing
-- Gives: count
-- Index: none
-- What kind of process it is, only pg_monitor sees; its application_name everybody.
SELECT count(*) FROM pg_stat_activity
 WHERE backend_type = 'pg_cron launcher' OR application_name = 'pg_cron scheduler'
