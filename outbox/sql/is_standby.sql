-- Does:  Tell whether this server is a standby.
-- Takes: nothing
-- Gives: is it?
-- Index: none
SELECT pg_catalog.pg_is_in_recovery()
