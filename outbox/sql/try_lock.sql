-- Does:  Take an advisory lock until the transaction ends, if nobody has it.
-- Takes: lock_class, lock
-- Gives: whether it was taken
-- Index: none
SELECT pg_try_advisory_xact_lock(CAST(%(lock_class)s AS integer), CAST(%(lock)s AS integer))
