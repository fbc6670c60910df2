-- Does:  Find out whether a superuser's session would run code that other roles can change: roles that may act as the owner of the schemas or of partitioned tables, and so could become superusers. Reads only the catalog.
-- Takes: nothing
-- Gives: a row with finding and remedy, or none
-- Index: none
SELECT format('%I is a superuser, and would run what others can change: %s, as a member of %s', s.rolname,
              string_agg(DISTINCT quote_ident(m.rolname), ', '), string_agg(DISTINCT quote_ident(o.rolname), ', ')) AS finding,
       'connect as a role that is no superuser, such as a member of pillarbox_monitor for doctor and status; of a migration, a superuser may run what pillarbox migrate --sql administrator prints' AS remedy
  FROM pg_roles s
 CROSS JOIN pg_roles o
  -- Nobody else can log in as the detacher, which has no password.
  JOIN pg_roles m ON pg_has_role(m.oid, o.oid, 'MEMBER') AND m.rolname <> concat(substring(o.rolname FROM '^(.*)_owner$'), '_detacher')
 WHERE s.rolsuper AND s.rolname IN (session_user, current_user) AND m.rolcanlogin AND NOT m.rolsuper
   AND o.oid IN (
       SELECT each.owner FROM pg_namespace n
        CROSS JOIN LATERAL (
              SELECT n.nspowner UNION SELECT c.relowner FROM pg_class c
               WHERE c.relnamespace = n.oid AND c.relkind = 'p') AS each (owner)
        -- In a schema that this transaction creates, nobody else can have made anything.
        WHERE n.nspname IN ('outbox', 'inbox') AND n.xmin IS DISTINCT FROM pg_current_xact_id_if_assigned()::xid)
 GROUP BY s.rolname
