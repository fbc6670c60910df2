-- Does:  Compare the owner, the maintainer and the detacher with the roles that pillarbox would create.
-- Takes: owner, maintainer, detacher
-- Gives: role, may_not_login, may_login, is_no_member
-- Index: none
SELECT r.rolname,
       r.rolname <> %(owner)s AND NOT r.rolcanlogin,
       r.rolname = %(owner)s AND r.rolcanlogin,
       r.rolname = %(detacher)s
           AND NOT pg_has_role(r.oid, (SELECT oid FROM pg_roles WHERE rolname = %(owner)s), 'USAGE')
  FROM pg_roles r
 WHERE r.rolname IN (%(owner)s, %(maintainer)s, %(detacher)s)
