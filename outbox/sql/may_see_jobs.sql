-- Does:  Check whether this role can SET ROLE to another, and whether that one may see and schedule pg_cron jobs.
-- Takes: role
-- Gives: true or false for each; no row if there is no such role
-- Index: none
SELECT pg_has_role(current_user, rolname, CASE
           WHEN current_setting('server_version_num')::int >= 160000
           THEN 'SET' ELSE 'MEMBER' END),
       has_schema_privilege(rolname, 'cron', 'USAGE')
  FROM pg_roles WHERE rolname = coalesce(%(role)s, current_user)
