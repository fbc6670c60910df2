-- Does:  Read which broker the relays of this database publish to.
-- Takes: nothing
-- Gives: identity, since when; no row until the first relay has recorded it
-- Index: none
SELECT identity, since FROM outbox.broker
