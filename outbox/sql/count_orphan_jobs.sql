-- Does:  Count the jobs of pg_cron whose roles are gone, as far as this role sees them.
-- Takes: nothing
-- Gives: count
-- Index: none
SELECT count(*) FROM cron.job WHERE username NOT IN (SELECT rolname FROM pg_roles)
