-- Does:  Find out whether all days have the index by tenant.
-- Takes: nothing
-- Gives: whether there is one
-- Index: none
SELECT coalesce((SELECT indisvalid FROM pg_catalog.pg_index WHERE indexrelid = to_regclass('outbox.message_tenant_idx')), false)
