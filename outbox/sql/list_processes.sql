-- Does:  List the sessions of pillarbox's own processes in this database, with the lanes that they hold.
-- Takes: classes (of the locks of the outbox and of each consumer)
-- Gives: pid, name (its application_name), role, client and since (null: unknown to this role), lanes
-- Index: none, reads pg_stat_activity and pg_locks
SELECT a.pid, a.application_name AS name, a.usename::text AS role, a.client_addr::text AS client, a.backend_start AS since,
       coalesce(array_agg(l.objid::bigint::integer ORDER BY l.objid) FILTER (WHERE l.objid::bigint < 100), '{}') AS lanes
  FROM pg_catalog.pg_stat_activity AS a
  LEFT JOIN pg_catalog.pg_locks AS l
         ON l.pid = a.pid AND l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
        -- pg_locks shows both halves of the key as oid, which is unsigned.
        AND l.classid::bigint = ANY (%(classes)s)
 WHERE a.datname = pg_catalog.current_database()
   AND a.application_name LIKE 'pillarbox %%'
   AND a.pid <> pg_catalog.pg_backend_pid()
 GROUP BY a.pid, a.application_name, a.usename, a.client_addr, a.backend_start
 ORDER BY a.application_name, a.pid
