-- Does:  Find who holds the lanes of the outbox.
-- Takes: lock_class
-- Gives: lane, pid, name (its application_name; null: not visible)
-- Index: none, reads pg_locks and pg_stat_activity
SELECT l.objid::bigint::integer AS lane, l.pid, a.application_name AS name
  FROM pg_catalog.pg_locks AS l
  LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
 WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
   AND l.classid::bigint = %(lock_class)s
   AND l.objid::bigint < 48
   AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())
