-- Does:  Create the missing partitions of all tables.
-- Takes: nothing
-- Gives: problem (what could not be created, and why), remedy
-- Index: none
SELECT problem, remedy FROM outbox.make_days()
