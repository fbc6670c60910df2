-- Does:  Read why the upkeep fails.
-- Takes: nothing
-- Gives: failure (null: none)
-- Index: none
SELECT coalesce((SELECT string_agg(f.failure, '; ' ORDER BY f.failed_at) FROM outbox.upkeep_failure f), outbox.clock_problem())
  FROM outbox.upkeep u
