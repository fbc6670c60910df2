-- Does:  Find the sessions that hold an advisory lock, but whose role may not retry dead letters.
-- Takes: lock_class, lock
-- Gives: pid, role, application, client (null: local or not visible)
-- Index: none, reads pg_locks and pg_stat_activity
SELECT a.pid, CAST(a.usename AS text) AS role, a.application_name AS application, CAST(a.client_addr AS text) AS client
  FROM pg_catalog.pg_locks AS l
  JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
 WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
   -- pg_locks shows both halves of the key as oid, which is unsigned.
   AND l.classid = CAST(CAST(%(lock_class)s AS bigint) & 4294967295 AS oid)
   AND l.objid = CAST(CAST(%(lock)s AS bigint) AS oid)
   AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())
   AND NOT has_column_privilege(a.usesysid, '{schema}.dead_letter', 'retry_count', 'UPDATE')
   -- A NOINHERIT role has to SET ROLE first.
   AND NOT pg_has_role(a.usesysid, current_user, 'MEMBER')
 ORDER BY a.pid
