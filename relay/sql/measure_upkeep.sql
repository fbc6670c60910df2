-- Does:  Read how long ago the upkeep last succeeded, and why it fails.
-- Takes: nothing
-- Gives: age of the last success (null: never), failure (null: none since then)
-- Index: none
SELECT now() - u.succeeded_at, coalesce(u.failure, outbox.clock_problem()) FROM outbox.upkeep u
