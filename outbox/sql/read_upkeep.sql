-- Does:  Read how the last upkeep ended, whatever drives it.
-- Takes: nothing
-- Gives: succeeded_at (null: never), awaited_at (null: unknown), now, failed_at and failure (null: succeeded since), clock_problem (null: none), whether it succeeded elsewhere
-- Index: none
SELECT u.succeeded_at, u.awaited_at, now(), u.failed_at, u.failure, outbox.clock_problem(),
       NOT pg_is_in_recovery() AND coalesce(u.succeeded_in <> outbox.place(), false)
  FROM (SELECT) AS always LEFT JOIN outbox.upkeep u ON true
