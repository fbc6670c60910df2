-- Does:  Tell the time, which database this is, and whether it has our schema.
-- Takes: nothing
-- Gives: now, database, whether outbox.message exists
-- Index: none
SELECT clock_timestamp(), current_database(), to_regclass('outbox.message') IS NOT NULL
