-- Does:  Add the index by tenant to the table, and so to each day that is added from now on, but not to existing days.
-- Takes: nothing
-- Gives: nothing
-- Index: none
CREATE INDEX IF NOT EXISTS message_tenant_idx ON ONLY outbox.message (tenant, lane, seq) WHERE tenant IS NOT NULL
