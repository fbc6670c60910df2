-- Does:  Measure when the upkeep last succeeded, and read why it fails.
-- Takes: nothing
-- Gives: age of the last success (null: never), failure (null: succeeded since)
-- Index: none
SELECT now() - u.succeeded_at, coalesce(u.failure, outbox.clock_problem()) FROM outbox.upkeep u
