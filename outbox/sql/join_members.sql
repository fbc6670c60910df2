-- Does:  Become a member: hold the member lock in shared mode until the session ends.
-- Takes: class, member
-- Gives: one row: joined; false if another session holds it exclusively, or is waiting to
-- Index: none
SELECT pg_catalog.pg_try_advisory_lock_shared(%(class)s::int, %(member)s::int) AS joined
