-- Does:  List sessions that hold or wait for pillarbox's advisory locks, but whose role isn't a member of pillarbox's roles.
-- Takes: class (int4 of the outbox's locks), classes (int4 of all of pillarbox's locks), bells (objects that writers lock in shared mode, to ring or to cancel), roles
-- Gives: pid, role, application, client (null: unknown), locks (how many)
-- Index: none, reads pg_locks
WITH of_upkeep AS (
    SELECT pg_catalog.hashtextextended(pg_catalog.format('%%s %%s.%%s', step.name, n.nspname, c.relname), 0) AS key
      FROM pg_catalog.pg_class AS c
      JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
     CROSS JOIN (VALUES ('outbox.make_partitions'), ('outbox.finish_detached')) AS step (name)
     WHERE c.relkind = 'p' AND n.nspname IN ('outbox', 'inbox')
)
SELECT a.pid, a.usename::text AS role, a.application_name AS application, a.client_addr::text AS client, count(*)::integer AS locks
  FROM pg_catalog.pg_locks AS l
  JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
 WHERE l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
   AND l.locktype = 'advisory'
   -- pg_locks shows both halves of the key as oid, which is unsigned.
   AND (l.objsubid = 2
        AND l.classid IN (SELECT (class::bigint & 4294967295)::oid FROM unnest(%(classes)s::int[]) AS ours (class))
        AND NOT (l.mode = 'ShareLock' AND l.classid = (%(class)s::bigint & 4294967295)::oid AND l.objid::bigint = ANY (%(bells)s::bigint[]))
        OR l.objsubid = 1
        AND (l.classid::bigint, l.objid::bigint) IN (SELECT k.key >> 32 & 4294967295, k.key & 4294967295 FROM of_upkeep AS k))
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_roles AS r
                    WHERE r.rolname = ANY (%(roles)s::text[]) AND pg_has_role(a.usename, r.oid, 'MEMBER'))
 GROUP BY 1, 2, 3, 4
 ORDER BY a.pid
