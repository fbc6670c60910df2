-- Does:  Read how the last upkeep ended.
-- Takes: nothing
-- Gives: succeeded_at (null: never), awaited_at (null: unknown), now, failed_at and failure (null: none), clock_problem (null: none)
-- Index: none
SELECT u.succeeded_at, u.awaited_at, now() AS now, f.failed_at, f.failure, outbox.clock_problem() AS clock_problem
  FROM (SELECT max(failed_at) AS failed_at, string_agg(failure, '; ' ORDER BY failed_at) AS failure FROM outbox.upkeep_failure) AS f
  LEFT JOIN outbox.upkeep u ON true
