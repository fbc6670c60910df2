-- Does:  Count the sessions of replicas that share the lanes of a reader.
-- Takes: member (their lock's object)
-- Gives: class (of the lock, unsigned), members
-- Index: none, reads pg_locks
SELECT l.classid::bigint AS class, count(*) AS members
  FROM pg_catalog.pg_locks AS l
 WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted AND l.mode = 'ShareLock'
   AND l.objid::bigint = %(member)s
   AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())
 GROUP BY l.classid
