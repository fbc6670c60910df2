-- Does:  List the sessions whose locks a migration may wait for, the oldest transaction first.
-- Takes: class, migration (the object of the lock that serializes migrations)
-- Gives: pid, role, application, client (null: unknown), what they hold, since (null: unknown)
-- Index: none, reads pg_locks
SELECT a.pid, a.usename::text AS role, a.application_name AS application, a.client_addr::text AS client,
       CASE WHEN bool_or(l.locktype = 'advisory') THEN 'the lock of migrations'
            ELSE 'a lock on ' || min(l.relation::regclass::text) END AS what,
       now() - a.xact_start AS since
  FROM pg_catalog.pg_locks AS l
  JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
 WHERE l.granted
   AND l.pid <> pg_catalog.pg_backend_pid()
   AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
   AND (l.locktype = 'advisory' AND l.objsubid = 2
        AND l.classid = (%(class)s::bigint & 4294967295)::oid AND l.objid = %(migration)s::int::oid
        OR l.locktype = 'relation'
        AND l.relation IN (SELECT c.oid FROM pg_catalog.pg_class AS c
                             JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
                            WHERE n.nspname IN ('outbox', 'inbox') AND c.relkind IN ('r', 'p')))
 GROUP BY a.pid, a.usename, a.application_name, a.client_addr, a.xact_start
 ORDER BY bool_or(l.locktype = 'advisory') DESC, a.xact_start NULLS LAST
 LIMIT 5
