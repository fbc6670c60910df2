-- Does:  Tell whether a role may look at pg_cron's jobs, and have some.
-- Takes: role
-- Gives: true or false
-- Index: none
SELECT has_schema_privilege(%(role)s, 'cron', 'USAGE')
