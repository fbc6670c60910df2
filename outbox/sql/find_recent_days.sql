-- Does:  Find the start of the first partition of outbox.message that can hold messages of this time or later.
-- Takes: since
-- Gives: starts_at (null: there is no such partition)
-- Index: none, reads the catalog
SELECT min(starts_at) AS starts_at FROM outbox.partitions('outbox.message') WHERE ends_at > %(since)s
