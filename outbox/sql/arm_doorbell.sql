-- Does:  Take the doorbell's lock exclusively if no transaction holds it in shared mode.
-- Takes: class, object
-- Gives: one row: ours (we hold it), theirs (another idle process holds it)
-- Index: none, reads pg_locks
SELECT pg_catalog.pg_try_advisory_lock(%(class)s::int, %(object)s::int) AS ours,
       EXISTS (
           SELECT FROM pg_catalog.pg_locks
            WHERE locktype = 'advisory'
              AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
              AND classid = (%(class)s::bigint & 4294967295)::oid
              AND objid = %(object)s::int::oid
              AND objsubid = 2
              AND mode = 'ExclusiveLock'
              AND granted
              AND pid <> pg_catalog.pg_backend_pid()
       ) AS theirs
