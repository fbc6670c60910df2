-- Does:  List sessions that hold or wait for our advisory locks, but whose role is no member of ours.
-- Takes: classes (int4 of the locks), member (the object that members hold in shared mode), roles
-- Gives: pid, role, application, client (null: unknown), locks (how many)
-- Index: none, reads pg_locks
SELECT a.pid, a.usename::text AS role, a.application_name AS application, a.client_addr::text AS client,
       count(*)::integer AS locks
  FROM pg_catalog.pg_locks AS l
  JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
 WHERE l.locktype = 'advisory'
   AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
   AND l.objsubid = 2
   -- pg_locks shows both halves of the key as oid, which is unsigned.
   AND l.classid IN (SELECT (class::bigint & 4294967295)::oid FROM unnest(%(classes)s::int[]) AS ours (class))
   -- Writers of any role hold the doorbells in shared mode.
   AND (l.mode = 'ExclusiveLock' OR l.objid = %(member)s::int::oid)
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_roles AS r
                    WHERE r.rolname = ANY (%(roles)s::text[]) AND pg_has_role(a.usename, r.oid, 'MEMBER'))
 GROUP BY a.pid, a.usename, a.application_name, a.client_addr
 ORDER BY a.pid
