-- Does:  Check whether this role can SET ROLE to another.
-- Takes: role
-- Gives: true, false, or null if there is no such role
-- Index: none
SELECT bool_and(pg_has_role(current_user, rolname, CASE
           WHEN current_setting('server_version_num')::int >= 160000
           THEN 'SET' ELSE 'MEMBER' END))
  FROM pg_roles WHERE rolname = %(role)s
