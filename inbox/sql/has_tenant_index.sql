-- Does:  Find out whether the owner has made the index by tenant on all days.
-- Takes: nothing
-- Gives: whether there is one
-- Index: none
SELECT coalesce((SELECT indisvalid FROM pg_catalog.pg_index WHERE indexrelid = to_regclass('outbox.message_tenant_idx')), false)
