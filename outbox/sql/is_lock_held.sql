-- Does:  Check whether some session of this database holds an advisory lock.
-- Takes: lock_class, lock
-- Gives: true or false
-- Index: none, reads pg_locks
SELECT EXISTS (
    SELECT FROM pg_catalog.pg_locks AS l
     WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
       AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
       -- pg_locks shows both halves of the key as oid, which is unsigned.
       AND l.classid = (%(lock_class)s::bigint & 4294967295)::oid AND l.objid = %(lock)s::int::oid)
