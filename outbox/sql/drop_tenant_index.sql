-- Does:  Drop the index by tenant of all days.
-- Takes: nothing
-- Gives: nothing
-- Index: none
DROP INDEX IF EXISTS outbox.message_tenant_idx
