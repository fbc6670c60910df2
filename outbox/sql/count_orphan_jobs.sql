-- Does:  Count the pg_cron jobs whose roles no longer exist, among those that this role sees.
-- Takes: nothing
-- Gives: count
-- Index: none
SELECT count(*) FROM cron.job WHERE username NOT IN (SELECT rolname FROM pg_roles)
