-- Does:  Read the time, the database's name, and whether it has pillarbox's schema.
-- Takes: nothing
-- Gives: now, database, whether outbox.message exists
-- Index: none
SELECT clock_timestamp(), current_database(), to_regclass('outbox.message') IS NOT NULL
