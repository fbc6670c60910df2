-- Does:  Count the launchers of pg_cron, and the jobs whose roles no longer exist, among those that this role sees.
-- Takes: nothing
-- Gives: both counts
-- Index: none
-- Only pg_monitor sees the backend_type; every role sees the application_name.
SELECT (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pg_cron launcher' OR application_name = 'pg_cron scheduler'),
       (SELECT count(*) FROM cron.job WHERE username NOT IN (SELECT rolname FROM pg_roles))
