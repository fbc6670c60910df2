-- Does:  List the lanes of the outbox that relays hold.
-- Takes: lock_class
-- Gives: lane
-- Index: none, reads pg_locks
SELECT l.objid::bigint::integer AS lane
  FROM pg_catalog.pg_locks AS l
 WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
   AND l.classid::bigint = %(lock_class)s
   AND l.objid::bigint < 48
   AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())
