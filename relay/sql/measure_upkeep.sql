-- Does:  Read how long ago the upkeep last succeeded, and why it fails.
-- Takes: nothing
-- Gives: age of the last success (null: never), failure (null: none)
-- Index: none
SELECT now() - u.succeeded_at,
       coalesce((SELECT string_agg(f.failure, '; ' ORDER BY f.failed_at) FROM outbox.upkeep_failure f), outbox.clock_problem())
  FROM outbox.upkeep u
