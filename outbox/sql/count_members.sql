-- Does:  Count the processes that share the lanes of a lock class; doubles as the heartbeat.
-- Takes: class (int4 of the lock), member (its object that every member holds in shared mode)
-- Gives: one row: members
-- Index: none, reads pg_locks
SELECT count(*)::int AS members
  FROM pg_catalog.pg_locks
 WHERE locktype = 'advisory'
   AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
   -- pg_locks shows both halves of the key as oid, which has no sign.
   AND classid = (%(class)s::bigint & 4294967295)::oid
   AND objid = %(member)s::int::oid
   AND objsubid = 2
   AND granted
