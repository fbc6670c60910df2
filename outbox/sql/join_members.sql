-- Does:  Become a member: hold the member lock in shared mode until the session ends.
-- Takes: class, member
-- Gives: one row: pid of the session on the server
-- Index: none
SELECT pg_catalog.pg_backend_pid() AS pid
  FROM (SELECT pg_catalog.pg_advisory_lock_shared(%(class)s::int, %(member)s::int)) AS joined
