-- Does:  Check whether this server is a standby.
-- Takes: nothing
-- Gives: true or false
-- Index: none
SELECT pg_catalog.pg_is_in_recovery()
