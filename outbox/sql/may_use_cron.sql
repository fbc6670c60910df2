-- Does:  Check whether a role may see and schedule pg_cron jobs.
-- Takes: role (null: the current one)
-- Gives: true or false
-- Index: none
SELECT has_schema_privilege(coalesce(%(role)s, current_user::text), 'cron', 'USAGE')
