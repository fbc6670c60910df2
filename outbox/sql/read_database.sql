-- Does:  Read the time, the database's name, whether this server is a standby, and whether the database has pillarbox's schema.
-- Takes: nothing
-- Gives: now, database, is_standby, whether outbox.message exists
-- Index: none
SELECT clock_timestamp(), current_database(), pg_is_in_recovery(), to_regclass('outbox.message') IS NOT NULL
