-- Does:  List the tables whose row-level security hides rows from one of our roles.
-- Takes: owner, roles (those that read the tables)
-- Gives: table, whether it is forced on the owner, roles (those that it applies to)
-- Index: none
-- Whoever logs in as one of our roles counts; the role itself only if nobody does. The tables of
-- consumers that are kept apart (docs/database.md) have a policy own_rows, and are left out.
WITH reader (oid, name) AS (
    SELECT l.oid, l.rolname
      FROM pg_roles g
      JOIN pg_roles l ON l.rolcanlogin AND pg_has_role(l.oid, g.oid, 'MEMBER') OR l.oid = g.oid
     WHERE g.rolname = ANY (%(roles)s)
       AND NOT l.rolsuper AND NOT l.rolbypassrls
       AND (l.oid <> g.oid OR NOT EXISTS (
            SELECT FROM pg_roles o WHERE o.rolcanlogin AND NOT o.rolsuper AND o.oid <> g.oid AND pg_has_role(o.oid, g.oid, 'MEMBER')))
)
SELECT c.oid::regclass::text, c.relforcerowsecurity, array_agg(DISTINCT r.name ORDER BY r.name)
  FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_roles o ON o.oid = c.relowner
  JOIN (SELECT e.oid, e.name, false AS is_owner FROM reader e
         UNION ALL SELECT w.oid, w.rolname, true FROM pg_roles w WHERE w.rolname = %(owner)s AND NOT w.rolsuper AND NOT w.rolbypassrls) AS r
    ON CASE WHEN r.is_owner OR pg_has_role(r.oid, c.relowner, 'USAGE') THEN c.relforcerowsecurity ELSE NOT c.relispartition END
 WHERE n.nspname IN ('outbox', 'inbox') AND c.relkind IN ('r', 'p') AND c.relrowsecurity
   AND (c.relforcerowsecurity
        OR n.nspname <> 'inbox'
        OR NOT EXISTS (SELECT FROM pg_policy p WHERE p.polrelid = c.oid AND p.polname = 'own_rows'))
 GROUP BY c.oid, c.relforcerowsecurity
 ORDER BY 1
