-- Does:  Find tables whose row-level security hides rows from one of our roles.
-- Takes: owner, roles, owner_role, detacher_role, application_role (the other roles read the tables)
-- Gives: severity, finding, remedy
-- Index: none
-- The logins that are members of a role count; the role itself only if it has none.
WITH reader (oid, name) AS (
    SELECT l.oid, l.rolname
      FROM pg_roles g
      JOIN pg_roles l ON l.rolcanlogin AND pg_has_role(l.oid, g.oid, 'MEMBER') OR l.oid = g.oid
     WHERE g.rolname = ANY (%(roles)s) AND g.rolname NOT IN (%(owner_role)s, %(detacher_role)s, %(application_role)s)
       AND NOT l.rolsuper AND NOT l.rolbypassrls
       AND (l.oid <> g.oid OR NOT EXISTS (
            SELECT FROM pg_roles o WHERE o.rolcanlogin AND NOT o.rolsuper AND o.oid <> g.oid AND pg_has_role(o.oid, g.oid, 'MEMBER')))
)
SELECT 'error',
       format('row-level security of %%s applies to %%s, which refuse to run because it would hide rows',
              c.oid::regclass, string_agg(DISTINCT r.name, ', ' ORDER BY r.name)),
       format('%%sALTER TABLE %%s DISABLE ROW LEVEL SECURITY;  -- or give the role BYPASSRLS',
              CASE WHEN c.relforcerowsecurity THEN format('ALTER TABLE %%s NO FORCE ROW LEVEL SECURITY; ', c.oid::regclass) END, c.oid::regclass)
  FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN (SELECT e.oid, e.name, false AS is_owner FROM reader e
         UNION ALL SELECT w.oid, w.rolname, true FROM pg_roles w WHERE w.rolname = %(owner)s AND NOT w.rolsuper AND NOT w.rolbypassrls) AS r
    ON CASE WHEN r.is_owner OR pg_has_role(r.oid, c.relowner, 'USAGE') THEN c.relforcerowsecurity ELSE NOT c.relispartition END
 WHERE n.nspname IN ('outbox', 'inbox') AND c.relkind IN ('r', 'p') AND c.relrowsecurity
 GROUP BY c.oid, c.relforcerowsecurity
 ORDER BY 2
