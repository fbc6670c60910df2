-- Does:  Find the session that holds the upkeep's lock of this database.
-- Takes: class, object (the two halves of the lock)
-- Gives: is_ours (whether its role may run the upkeep), described; no row if none holds it
-- Index: none, reads pg_locks
SELECT pg_has_role(a.usesysid, c.relowner, 'MEMBER')
       OR has_function_privilege(a.usesysid, 'outbox.finish_detached(text)', 'EXECUTE') AS is_ours,
       format('session %%s of role %%s (application %%s)', a.pid, a.usename, coalesce(nullif(a.application_name, ''), '?')) AS described
  FROM pg_catalog.pg_locks AS l
  JOIN pg_catalog.pg_class AS c ON c.oid = 'outbox.message'::regclass
  JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
 WHERE l.locktype = 'advisory'
   AND l.granted
   AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
   AND l.classid = (%(class)s::bigint & 4294967295)::oid
   AND l.objid = (%(object)s::bigint & 4294967295)::oid
   AND l.objsubid = 2
 ORDER BY 1 LIMIT 1
