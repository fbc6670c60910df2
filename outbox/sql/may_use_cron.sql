-- Does:  Check whether a role may see and schedule pg_cron jobs.
-- Takes: role
-- Gives: true or false
-- Index: none
SELECT has_schema_privilege(%(role)s, 'cron', 'USAGE')
