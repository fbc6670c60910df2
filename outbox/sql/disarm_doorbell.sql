-- Does:  Release the doorbell's lock, and notify the other idle processes so that one takes it.
-- Takes: class, object, channel
-- Gives: one row: pg_notify
-- Index: none
SELECT pg_catalog.pg_notify(%(channel)s, 'disarmed')
 WHERE pg_catalog.pg_advisory_unlock(%(class)s::int, %(object)s::int)
